"""SkyPilot, as a managed job: it finds the TPUs, and starts the run again on others when they are taken back."""

from __future__ import annotations

import shlex
from typing import Any

from shardwright.launch.exits import SKYPILOT
from shardwright.launch.launch_plan import LaunchPlan, as_yaml
from shardwright.launch.request import IMAGE_FOLDER, Request
from shardwright.launch.slices import accelerator_type, generation

_FILE = "skypilot.yaml"
_PYTHON = "/usr/local/bin/python"  # the image's: SkyPilot puts one of its own first in PATH


def plan(request: Request) -> LaunchPlan:
    """The task, and ``sky jobs launch``."""
    return LaunchPlan(
        files={_FILE: as_yaml(task(request))},
        commands=[["sky", "jobs", "launch", "--yes", "--detach-run", "--name", request.name, _FILE]],
        afterwards=[
            ["sky", "jobs", "logs", "--name", request.name],
            ["sky", "jobs", "cancel", "--yes", "--name", request.name],
        ],
        notes=["restarts are not counted: SkyPilot makes one whenever hosts are lost, or the run was told to stop"],
    )


def task(request: Request) -> dict[str, Any]:
    """The task as SkyPilot takes it; its ``run`` is started on each host of the slice."""
    resources: dict[str, Any] = {
        "infra": f"gcp/*/{request.zone}" if request.zone else "gcp",
        "accelerators": f"tpu-{accelerator_type(request.topology)}",
        "accelerator_args": {"tpu_vm": True, "runtime_version": generation(request.topology).runtime},
        "image_id": f"docker:{request.image}",
        "use_spot": request.spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": list(SKYPILOT)},
    }
    lines = [
        f"cd {IMAGE_FOLDER}",
        # no shell stays between SkyPilot's signals and the run
        f"exec {shlex.join([_PYTHON, *request.command[1:]])}",
    ]
    made: dict[str, Any] = {"name": request.name, "resources": resources, "envs": request.variables}
    if request.mount is not None:
        made["file_mounts"] = {request.mount.path: {"source": request.mount.source, "mode": "MOUNT"}}
    return made | {"run": "\n".join(lines) + "\n"}
