"""TPU VMs by gcloud: a queued resource, and a loop on each host that restarts the run."""

import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

from shardwright.launch.exits import FINAL
from shardwright.launch.launch_plan import LaunchPlan
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
    describe = shlex.join([*_GCLOUD, "describe", request.name, *where, "--format=value(state.state)"])
    waits = _WAIT_TEMPLATE.substitute(name=request.name, describe=describe)
    files, folders, copied = {_HOST: _host_script(request), _WAIT: waits}, {}, [_HOST]
    if not request.image:
        files |= {_INSTALL: _INSTALL_SCRIPT, _NEEDS: requirements()}
        folders = sent_folders()
        copied = ["--recurse", _HOST, _INSTALL, _NEEDS, "shardwright"]
        for path in _recipe_files(request.train):
            files[path.name], copied = path.read_text(encoding="utf-8"), [*copied, path.name]
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


def _host_script(request: Request) -> str:
    start, stop = (_in_container if request.image else _in_environment)(request)
    return _HOST_TEMPLATE.substitute(
        start=start,
        stop=stop,
        install="" if request.image else f"bash {_INSTALL} || exit 1\n",
        restarts=request.max_restarts,
        final="|".join(map(str, (0, *FINAL))),
        slices=request.topology.slices,
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


def _in_environment(request: Request) -> tuple[str, str]:
    """The same commands for the code that was sent, in the environment that `install.sh` made."""
    variables = [f"{name}={value}" for name, value in ({"PYTHONPATH": "."} | request.variables).items()]
    names = {str(path): path.name for path in _recipe_files(request.train)}
    words = ["env/bin/python", "-m", "shardwright.scripts.train", *(names.get(word, word) for word in request.train)]
    return f"env $(cat megascale.env) {shlex.join(variables)} {shlex.join(words)}", "kill -TERM $run"


def _recipe_files(train: Sequence[str]) -> list[Path]:
    """The run's recipe, where it is a file of the user's: it is sent along, and lies beside the code."""
    return [Path(path) for name, path in itertools.pairwise(train) if name == "--recipe" and path.endswith(".py")]


_HOST_TEMPLATE = Template("""\
#!/usr/bin/env bash
# Runs training on this host, and starts it again where its exit code says that it may go on.
set -uo pipefail

# how several slices find each other: the TPU's own record has it, one NAME: 'value' a line
curl --silent --fail --header 'Metadata-Flavor: Google' \\
  http://metadata.google.internal/computeMetadata/v1/instance/attributes/tpu-env |
  sed -n "s/^\\(MEGASCALE_[A-Z_]*\\): *'\\(.*\\)'.*/\\1=\\2/p" > megascale.env
if [ $slices -gt 1 ] && ! grep -q '^MEGASCALE_COORDINATOR_ADDRESS=' megascale.env; then
  echo "this host's record does not say how its slice finds the others" >&2
  exit 2
fi

${install}stopped=
trap 'stopped=yes; $stop' TERM INT
restarts=0
while true; do
  $start &
  run=$$!
  wait $$run
  code=$$?
  if [ -n "$$stopped" ]; then  # that wait ended with the signal; this one with the run
    wait $$run
    exit
  fi
  case $$code in $final) exit $$code ;; esac
  restarts=$$((restarts + 1))
  if [ $$restarts -gt $restarts ]; then
    exit $$code
  fi
  echo "exit code $$code: restart $$restarts of $restarts" >&2
  sleep "$${PAUSE:-10}"
done
""")

_INSTALL_SCRIPT = f"""\
#!/usr/bin/env bash
# Makes an environment of Python 3.11 with what the run needs, once; the VM's own Python may be an older one.
set -euo pipefail
export PATH="$HOME/.local/bin:$PATH"
if ! cmp --quiet {_NEEDS} env/{_NEEDS}; then
  command -v uv > /dev/null || python3 -m pip install --quiet --user uv
  uv venv --quiet --clear --python 3.11 env
  uv pip install --quiet --python env/bin/python --requirement {_NEEDS}
  cp {_NEEDS} env/{_NEEDS}
fi
"""

_WAIT_TEMPLATE = Template("""\
#!/usr/bin/env bash
# Waits until the queued TPUs are there.
set -euo pipefail
while true; do
  state=$$($describe)
  case $$state in
    ACTIVE) exit 0 ;;
    FAILED | SUSPENDING | SUSPENDED | DELETING)
      echo "$name: $$state" >&2
      exit 1
      ;;
  esac
  echo "$name: $$state" >&2
  sleep "$${PAUSE:-30}"
done
""")
