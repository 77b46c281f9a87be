"""The options of `scripts/launch.py` before the `--`: where and how to start a run."""

import re
import shlex
from dataclasses import dataclass

from shardwright.arguments.option_values import Checked, check_values, option
from shardwright.errors import UserError

# a JobSet's pods are called NAME-slice-12-345-abcde, and Kubernetes allows 63 characters
_LONGEST_NAME = 40


@dataclass
class LaunchArguments(Checked):
    """The machines and commands that start a run. Times are seconds."""

    topology: str | None = option(None, "TPU slice to run on, as scripts/compile.py names it: v5p:2x2x4, v6e:4x4, …")
    slices: int = option(1, "Slices of that topology, joined by the data-centre network.")
    name: str = option("shardwright", "The run's name on the cluster.")
    image: str | None = option(
        None, "Container image with this repository in it (Dockerfile). tpu-vm needs none: it sends the code."
    )
    cluster: str | None = option(None, "GKE cluster (xpk).")
    project: str | None = option(None, "Google Cloud project (xpk, tpu-vm). Default: gcloud's own setting.")
    zone: str | None = option(None, "Zone of the TPUs (xpk, skypilot, tpu-vm).")
    queue: str | None = option(None, "Kueue's LocalQueue (jobset).")
    mount: str | None = option(
        None,
        "Storage to mount, as SOURCE:PATH. SOURCE is a claim or gs://BUCKET (jobset), a storage of xpk's, gs://BUCKET "
        "(skypilot), or a folder that each host has (tpu-vm).",
    )
    spot: bool = option(False, "Take capacity that may be taken back.")
    env: str = option("", "Further variables of the run's environment, as `NAME=value NAME=value`; no secrets.")
    max_restarts: int = option(50, "Restarts before a run counts as failed; preemptions count too.")
    grace_seconds: int = option(30, "Seconds between SIGTERM and the end, in which the last checkpoint is written.")
    output: str | None = option(None, "Folder to write the files into. Default: launch/NAME.")
    run: bool = option(False, "Run the commands too. Without it they are only shown.")

    def __post_init__(self) -> None:
        check_values(self)
        self.at_least(1, "a run takes place on at least one slice", "slices")
        self.at_least(0, "it can't be negative", "max_restarts", instead=50)
        self.at_least(1, "a checkpoint takes time", "grace_seconds", instead=30)
        good = len(self.name) <= _LONGEST_NAME and re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", self.name)
        why = f"clusters take a-z, 0-9 and -, a letter first, {_LONGEST_NAME} characters at most"
        self.check("name", good is not None and bool(good), why, "my-run")
        mount = self.mount is None or re.fullmatch(r"(gs://)?[\w.@/-]+:/[\w.@/-]+", self.mount)
        self.check("mount", bool(mount), "it is what to mount and where", "gs://bucket:/mnt/bucket")

    @property
    def environment(self) -> dict[str, str]:
        """The variables of ``--env``; raises UserError for a word that sets none."""
        try:
            words = shlex.split(self.env)
        except ValueError as error:
            words = [f"{error}: {self.env}"]  # which sets no variable
        for word in words:
            if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*=[^\n]*", word):
                raise UserError(
                    asked=f"--env {self.env!r:.200}",
                    found=f"{word!r:.80}",
                    why="each word sets a variable to a value of one line",
                    instead="--env 'NAME=value OTHER=\"two words\"'",
                )
        return dict(word.split("=", 1) for word in words)
