"""TPU VMs by gcloud: a queued resource, and a loop on each host that restarts the run."""

import shlex
from pathlib import Path

from shardwright.launch.exits import FINAL
from shardwright.launch.launch_plan import LaunchPlan, filled
from shardwright.launch.request import Request
from shardwright.launch.sent_code import requirements, sent_folders
from shardwright.launch.slices import accelerator_type, generation

_GCLOUD = ["gcloud", "compute", "tpus", "queued-resources"]
_HOST, _WAIT, _INSTALL, _NEEDS = "host.sh", "wait.sh", "install.sh", "needs.txt"
# goes on after the ssh connection ends, which shows the log meanwhile
_START = f"nohup bash {_HOST} > host.log 2>&1 < /dev/null & tail --pid=$! --lines=+1 --follow host.log; wait $!"


def plan(request: Request) -> LaunchPlan:
    """The hosts' loop, a script that waits for the hosts, and the gcloud commands."""
    where = [f"--zone={request.zone}", *([f"--project={request.project}"] if request.project else [])]
    every = ["--node=all", "--worker=all", *where]
    slices = request.topology.slices
    size = [f"--accelerator-type={accelerator_type(request.topology)}"]
    size += [f"--runtime-version={generation(request.topology).runtime}", *(["--spot"] if request.spot else [])]
    size += [f"--node-id={request.name}" if slices == 1 else f"--node-count={slices}"]
    describe = [*_GCLOUD, "describe", request.name, *where, "--format=value(state.state)"]
    start, stop = (_in_container if request.image else _in_environment)(request)
    host = filled(_HOST, run=request, start=start, stop=stop, final=(0, *FINAL))
    files, folders, copied = {_HOST: host, _WAIT: filled(_WAIT, run=request, describe=describe)}, {}, [_HOST]
    if not request.image:
        files |= {_INSTALL: filled(_INSTALL), _NEEDS: requirements()}
        folders = sent_folders()
        copied = ["--recurse", _HOST, _INSTALL, _NEEDS, "shardwright"]
        # the user's own lies beside the code
        if (recipe := _own_recipe(request)) is not None:
            files[recipe.name], copied = recipe.read_text(encoding="utf-8"), [*copied, recipe.name]
    return LaunchPlan(
        files=files,
        commands=[
            [*_GCLOUD, "create", request.name, *size, *where],
            ["bash", _WAIT],
            [*_GCLOUD, "scp", *copied, f"{request.name}:", *every],
            [*_GCLOUD, "ssh", request.name, *every, f"--command={_START}"],
        ],
        afterwards=[
            [*_GCLOUD, "ssh", request.name, *every, "--command=tail --follow host.log"],
            [*_GCLOUD, "delete", request.name, "--force", *where],
        ],
        notes=["the TPUs stay, and cost, until they are deleted"],
        folders=folders,
    )


def _in_container(request: Request) -> tuple[str, str]:
    """The commands that start the run on a host, and that tell it to end."""
    options = [f"--env {shlex.quote(f'{name}={value}')}" for name, value in request.variables.items()]
    mounts = [(request.mount.source, request.mount.path)] if request.mount else []
    mounts += [(request.staging, request.staging)] if request.staging else []
    options += [f"--volume {shlex.quote(f'{source}:{path}')}" for source, path in mounts]
    name, grace = request.name, request.grace_seconds
    # --init: as a container's first process a run would not end at a SIGTERM that it has no handler for
    start = (
        f"sudo docker run --rm --init --name {name} --privileged --net=host --stop-timeout {grace} "
        f"--env-file megascale.env {' '.join(options)} {shlex.quote(request.image)} {shlex.join(request.command)}"
    )
    return start, f"sudo docker stop --time {grace} {name} > /dev/null"


def _own_recipe(request: Request) -> Path | None:
    """The recipe's file, where it is one that lies here; on a disk of the hosts alone it stays there."""
    path = Path(request.option("recipe")).expanduser()
    return path if path.suffix == ".py" and path.exists() else None


def _in_environment(request: Request) -> tuple[str, str]:
    """The same commands for the code that was sent, in the environment that `install.sh` made."""
    variables = [f"{name}={value}" for name, value in ({"PYTHONPATH": "."} | request.variables).items()]
    recipe, sent = request.option("recipe"), _own_recipe(request)
    names = {} if sent is None else {word + recipe: word + sent.name for word in ("", "--recipe=")}
    words = ["env/bin/python", "-m", "shardwright.scripts.train", *(names.get(word, word) for word in request.train)]
    return f"env $(cat megascale.env) {shlex.join(variables)} {shlex.join(words)}", "kill -TERM $run"
