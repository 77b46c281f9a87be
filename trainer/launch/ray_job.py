"""Ray: a job on a cluster with TPU hosts that starts a worker on each."""

from pathlib import Path

from shardwright.launch.launch_plan import LaunchPlan, filled
from shardwright.launch.request import Request
from shardwright.launch.sent_code import sent_folders

ROOT = Path(__file__).resolve().parents[2]  # of a checkout
NOT_SENT = {".git", "launch", "output", "tests", "docs"}  # folders in it that a job does not get
_FILE = "runtime_env.yaml"


def plan(request: Request) -> LaunchPlan:
    """The environment of the job's processes, and ``ray job submit`` (to RAY_API_SERVER_ADDRESS)."""
    checkout = str(ROOT) if (ROOT / "pyproject.toml").is_file() else ""
    hosts = ["python", "-m", "shardwright.launch.ray_hosts", "--topology", request.topology.name]
    hosts += ["--slices", str(request.topology.slices)]
    hosts += ["--max_restarts", str(request.max_restarts), "--grace_seconds", str(request.grace_seconds)]
    submit = ["ray", "job", "submit", "--no-wait", "--submission-id", request.name, "--runtime-env", _FILE]
    return LaunchPlan(
        files={_FILE: filled(_FILE, run=request, checkout=checkout)},
        commands=[[*submit, "--", *hosts, "--", "python", "-m", "shardwright.scripts.train", *request.train]],
        afterwards=[["ray", "job", "logs", "--follow", request.name], ["ray", "job", "stop", request.name]],
        notes=["the hosts need the packages of pip install -e '.[tpu]'; the code itself is sent to them"],
        folders=sent_folders(),
    )
