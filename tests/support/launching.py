"""Requests to start a run on TPU hosts, as `scripts/launch.py` makes them."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import yaml

from shardwright.launch.launch_plan import LaunchPlan
from shardwright.launch.request import Mount, Request
from shardwright.launch.targets import TARGETS
from shardwright.xla.chips import find_topology

OUTPUT = "gs://bucket/runs/one"


def request(topology: str = "v5p:2x2x4", slices: int = 1, mount: str = "", **changes: Any) -> Request:
    """A request that every target could take, but for ``changes``."""
    output_dir = changes.pop("output_dir", OUTPUT)
    train = changes.pop("train", ("--recipe", "mixtral_ep", "--output_dir", output_dir))
    given = {"name": "one", "image": "image:1", "cluster": "pods", "zone": "us-east5-a", **changes}
    source, _, path = mount.rpartition(":")
    where = Mount(source, path) if mount else None
    return Request(find_topology(topology, slices), tuple(train), output_dir, mount=where, **given)


def planned(target: str, *arguments: Any, **changes: Any) -> LaunchPlan:
    """The plan of ``target`` for :func:`request`."""
    return TARGETS[target].plan(request(*arguments, **changes))


def jobset(*arguments: Any, **changes: Any) -> dict[str, Any]:
    return yaml.safe_load(planned("jobset", *arguments, **changes).files["jobset.yaml"])


def pod(manifest: dict[str, Any]) -> dict[str, Any]:
    """The pods' specification in a JobSet."""
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


def variables(manifest: dict[str, Any]) -> dict[str, str]:
    """The environment that a JobSet gives its container, without what comes from the pod's fields."""
    env = pod(manifest)["containers"][0]["env"]
    return {each["name"]: each["value"] for each in env if "value" in each}


def stand_in(folder: Path, name: str, lines: str) -> Path:
    """A program called ``name`` in ``folder``: a shell script of ``lines``."""
    folder.mkdir(exist_ok=True)
    file = folder / name
    file.write_text(f"#!/usr/bin/env bash\n{lines}\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file
