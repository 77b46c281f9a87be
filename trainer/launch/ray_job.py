"""Ray, on a cluster that has the TPU hosts: a job that starts a worker on each of them."""

from __future__ import annotations

from pathlib import Path

from shardwright.launch.launch_plan import LaunchPlan, as_yaml
from shardwright.launch.request import Request

_ROOT = Path(__file__).resolve().parents[2]
_FILE = "runtime_env.yaml"


def plan(request: Request) -> LaunchPlan:
    """The environment of the job's processes, and ``ray job submit``; RAY_API_SERVER_ADDRESS says where."""
    environment = {
        "working_dir": str(_ROOT),
        "excludes": ["/.git", "/launch", "/output", "/tests", "/docs"],  # from the root alone
        "env_vars": request.variables,
    }
    hosts = ["python", "-m", "shardwright.launch.ray_hosts", "--topology", request.topology.name]
    hosts += ["--slices", str(request.topology.slices)]
    hosts += ["--max_restarts", str(request.max_restarts), "--grace_seconds", str(request.grace_seconds)]
    submit = ["ray", "job", "submit", "--no-wait", "--submission-id", request.name, "--runtime-env", _FILE]
    return LaunchPlan(
        files={_FILE: as_yaml(environment)},
        commands=[[*submit, "--", *hosts, "--", *request.command]],
        afterwards=[["ray", "job", "logs", "--follow", request.name], ["ray", "job", "stop", request.name]],
        notes=["the hosts need the packages of pip install -e '.[tpu]'; the code itself is sent to them"],
    )
