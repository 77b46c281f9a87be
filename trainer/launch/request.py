"""A launch request: where a run takes place, and its options, checked as far as possible without devices."""

from __future__ import annotations

import itertools
import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from shardwright.errors import UserError
from shardwright.launch.slices import hosts
from shardwright.xla.chips import Topology
from shardwright.xla.program_cache import COMPILED

if TYPE_CHECKING:
    from shardwright.arguments.training import TrainingArguments

STORES = ("gs", "s3")  # schemes of stores that every host reaches
_OWN = ("/tmp", "/var/tmp", "/dev/shm", "/root", "/home")  # folders local to a host
IMAGE_FOLDER = "/shardwright"  # the repository in the image: Dockerfile


@dataclass(frozen=True)
class Mount:
    """Storage, mounted at ``path`` on every host."""

    source: str
    path: str

    @property
    def bucket(self) -> str:
        """Its name; empty if the source is none."""
        return self.source.removeprefix("gs://").strip("/") if self.source.startswith("gs://") else ""


@dataclass(frozen=True)
class Request:
    """A run to start, and where; targets plan it."""

    topology: Topology
    train: tuple[str, ...]  # the options of `scripts/train.py`, ``output_dir`` among them
    output_dir: str
    name: str = "shardwright"
    image: str = ""
    cluster: str = ""
    project: str = ""
    zone: str = ""
    queue: str = ""
    mount: Mount | None = None
    spot: bool = False
    environment: dict[str, str] = field(default_factory=dict)  # the user's variables
    max_restarts: int = 50
    grace_seconds: int = 30

    @property
    def hosts(self) -> int:
        """The hosts of one slice."""
        return hosts(self.topology)

    @property
    def command(self) -> list[str]:
        """The run's command, in the repository's folder."""
        return ["python", "scripts/train.py", *self.train]

    @property
    def staging(self) -> str:
        """The run's absolute ``--staging_dir``, shared with the host so that a restart finds it; else empty."""
        folder = self.option("staging_dir")
        return folder if posixpath.isabs(folder) else ""

    def option(self, name: str) -> str:
        """The value of the run's option ``--name``, in whichever spelling; empty if it is not given."""
        found = ""
        for word, after in itertools.pairwise([*self.train, ""]):
            spelt, equals, value = word.partition("=")
            if spelt.replace("-", "_") == f"__{name}":
                found = value if equals else after
        return found

    @property
    def variables(self) -> dict[str, str]:
        """The environment of every host."""
        # without PJRT_DEVICE a host that finds no TPU would train on virtual CPU devices
        compiled = f"{self.output_dir.rstrip('/')}/compiled"
        return {"PJRT_DEVICE": "TPU", "PYTHONUNBUFFERED": "1", COMPILED: compiled, **self.environment}


def check_train(
    words: Sequence[str], mount: Mount | None, *, container: bool
) -> tuple[tuple[str, ...], TrainingArguments]:
    """Checks a run's options, by `scripts/train.py`'s own parser, and returns them as words and read.

    ``--resume_from_checkpoint latest`` is added, so that a restart goes on from the newest checkpoint. In a
    ``container`` the run sees only its disk and mounts.

    Raises:
        UserError: a bad option, or an output folder that a restart on another host would not find.
    """
    from shardwright.arguments.command_line import parse
    from shardwright.arguments.training import TrainingArguments
    from shardwright.layout.auto import AUTO
    from shardwright.layout.load_recipe import load_recipe

    (args,) = parse([TrainingArguments], words, "The options of scripts/train.py, after the `--`.")
    if args.recipe != AUTO and not (mount and _inside(args.recipe, mount.path) and not os.path.exists(args.recipe)):
        load_recipe(args.recipe)
    _check_shared(args.output_dir, mount, container)
    if args.resume_from_checkpoint is None:
        return (*words, "--resume_from_checkpoint", "latest"), args
    if args.resume_from_checkpoint != "latest":
        raise UserError(
            asked=f"--resume_from_checkpoint {args.resume_from_checkpoint}",
            found="one checkpoint",
            why="each restart would go back to it, and lose what was learned since",
            instead="--resume_from_checkpoint latest, with that checkpoint copied into --output_dir",
        )
    return tuple(words), args


def _check_shared(output_dir: str | None, mount: Mount | None, container: bool) -> None:
    """Refuses an output folder that each host, or each start, would have for itself."""
    bucket = f"{mount.path}/my-run" if mount is not None else "gs://bucket/my-run"
    if output_dir is None:
        found, why = "no --output_dir", "the default is a folder of the host, which goes with it"
    elif "://" in output_dir:
        if output_dir.partition("://")[0] in STORES:
            return
        found, why = f"{output_dir}, which is none of gs:// and s3://", "each host would write for itself"
    elif mount is not None and _inside(output_dir, mount.path):
        return
    elif container:
        found, why = f"{output_dir}, on the container's own disk", "that goes with the container"
    elif of_one_host(output_dir):
        found, why = f"{output_dir}, which each host has for itself", "a restart on another host would not find it"
    else:
        return
    more = "" if mount is not None else ", or a folder under --mount SOURCE:PATH"
    raise UserError(
        asked="an output folder that every host and every restart can reach",
        found=found,
        why=why,
        instead=f"--output_dir {bucket}" + (more if container else ", or a folder on a disk that all hosts mount"),
    )


def of_one_host(path: str) -> bool:
    """Whether each host has a folder of its own at ``path``."""
    whole = os.path.expanduser(path)
    return not os.path.isabs(whole) or any(_inside(whole, own) for own in _OWN)


def _inside(path: str, folder: str) -> bool:
    return PurePosixPath(posixpath.normpath(path)).is_relative_to(posixpath.normpath(folder))
