"""SkyPilot: a managed job, restarted on other TPUs when its own are taken back."""

from shardwright.launch.exits import SKYPILOT
from shardwright.launch.launch_plan import LaunchPlan, filled
from shardwright.launch.request import IMAGE_FOLDER, Request
from shardwright.launch.slices import accelerator_type, generation

_FILE = "skypilot.yaml"


def plan(request: Request) -> LaunchPlan:
    """The task, and ``sky jobs launch``."""
    tpu = {"accelerator": accelerator_type(request.topology), "runtime": generation(request.topology).runtime}
    return LaunchPlan(
        files={_FILE: filled(_FILE, run=request, again=SKYPILOT, folder=IMAGE_FOLDER, **tpu)},
        commands=[["sky", "jobs", "launch", "--yes", "--detach-run", "--name", request.name, _FILE]],
        afterwards=[
            ["sky", "jobs", "logs", "--name", request.name],
            ["sky", "jobs", "cancel", "--yes", "--name", request.name],
        ],
        notes=["restarts are not counted: SkyPilot makes one whenever hosts are lost, or the run was told to stop"],
    )
