"""SkyPilot: a managed job, restarted on other TPUs when its own are taken back."""

import shlex
from typing import Any

from shardwright.launch.exits import SKYPILOT
from shardwright.launch.launch_plan import LaunchPlan, as_yaml
from shardwright.launch.request import IMAGE_FOLDER, Request
from shardwright.launch.slices import accelerator_type, generation

_FILE = "skypilot.yaml"
_PYTHON = "/usr/local/bin/python"  # the image's: SkyPilot's own is first in PATH


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
    """The task's YAML; its ``run`` is started on each host of the slice."""
    resources: dict[str, Any] = {
        "infra": f"gcp/*/{request.zone}" if request.zone else "gcp",
        "accelerators": f"tpu-{accelerator_type(request.topology)}",
        "accelerator_args": {"tpu_vm": True, "runtime_version": generation(request.topology).runtime},
        "image_id": f"docker:{request.image}",
        "use_spot": request.spot,
        "job_recovery": {"max_restarts_on_errors": 0, "recover_on_exit_codes": list(SKYPILOT)},
    }
    # exec: no shell stays between SkyPilot's signals and the run
    run = f"cd {IMAGE_FOLDER}\nexec {shlex.join([_PYTHON, *request.command[1:]])}\n"
    mounts = {request.mount.path: {"source": request.mount.source, "mode": "MOUNT"}} if request.mount else None
    return {
        "name": request.name,
        "resources": resources,
        "envs": request.variables,
        **({"file_mounts": mounts} if mounts else {}),
        "run": run,
    }
