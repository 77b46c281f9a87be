"""xpk, which makes a JobSet of its own."""

import shlex

from shardwright.launch.exits import XPK_TOO
from shardwright.launch.launch_plan import LaunchPlan
from shardwright.launch.request import Request
from shardwright.launch.slices import generation, shape

_ENV = "xpk.env"
_POLL = 5  # seconds by which xpk's shell, which polls the run, delays a SIGTERM


def plan(request: Request) -> LaunchPlan:
    """The environment's file, and ``xpk workload create``."""
    where = ["--cluster", request.cluster]
    where += ["--project", request.project] if request.project else []
    where += ["--zone", request.zone] if request.zone else []
    variables = {**request.variables, "TPU_SKIP_MDS_QUERY": "true"}  # why: see jobset
    command = ["xpk", "workload", "create", "--workload", request.name, *where]
    command += ["--tpu-type", f"{generation(request.topology).gcloud}-{shape(request.topology)}"]
    command += ["--num-slices", str(request.topology.slices), "--docker-image", request.image]
    command += ["--max-restarts", str(request.max_restarts)]
    command += ["--restart-on-exit-codes", ",".join(map(str, XPK_TOO))]
    command += ["--termination-grace-period-seconds", str(request.grace_seconds + _POLL)]
    command += ["--env-file", _ENV, "--command", shell(request)]
    command += ["--storage", request.mount.source] if request.mount else []
    command += ["--spot"] if request.spot else []
    return LaunchPlan(
        files={_ENV: "".join(f"{name}={value}\n" for name, value in variables.items())},
        commands=[command],
        afterwards=[
            ["xpk", "workload", "list", *where],
            ["xpk", "workload", "delete", "--workload", request.name, *where],
        ],
    )


def shell(request: Request) -> str:
    """The run's line in xpk's shell; ``exec`` because xpk sends SIGTERM to the shell of this line."""
    return f"exec {shlex.join(request.command)}"
