"""TPU VMs by gcloud: a queued resource, and a loop on each host that restarts the run."""

import shlex
from string import Template

from shardwright.launch.exits import FINAL
from shardwright.launch.launch_plan import LaunchPlan
from shardwright.launch.request import Request
from shardwright.launch.slices import accelerator_type, generation

_GCLOUD = ["gcloud", "compute", "tpus", "queued-resources"]
_HOST, _WAIT = "host.sh", "wait.sh"
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
    return LaunchPlan(
        files={_HOST: _host_script(request), _WAIT: waits},
        commands=[
            [*_GCLOUD, "create", request.name, *size, *where],
            ["bash", _WAIT],
            [*_GCLOUD, "scp", _HOST, f"{request.name}:", *every],
            [*_GCLOUD, "ssh", request.name, *every, f"--command={_START}"],
        ],
        afterwards=[
            [*_GCLOUD, "ssh", request.name, *every, "--command=tail --follow host.log"],
            [*_GCLOUD, "delete", request.name, "--force", *where],
        ],
        notes=["the TPUs stay, and cost, until they are deleted"],
    )


def _host_script(request: Request) -> str:
    options = [f"--env {shlex.quote(f'{name}={value}')}" for name, value in request.variables.items()]
    mounts = [(request.mount.source, request.mount.path)] if request.mount else []
    mounts += [(request.staging, request.staging)] if request.staging else []
    options += [f"--volume {shlex.quote(f'{source}:{path}')}" for source, path in mounts]
    return _HOST_TEMPLATE.substitute(
        name=request.name,
        image=shlex.quote(request.image),
        options=" ".join(options),
        command=shlex.join(request.command),
        grace=request.grace_seconds,
        restarts=request.max_restarts,
        final="|".join(map(str, (0, *FINAL))),
        slices=request.topology.slices,
    )


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

stopped=
trap 'stopped=yes; sudo docker stop --time $grace $name > /dev/null' TERM INT
restarts=0
while true; do
  # --init: as a container's first process a run would not end at a SIGTERM that it has no handler for
  sudo docker run --rm --init --name $name --privileged --net=host --stop-timeout $grace \\
    --env-file megascale.env $options \\
    $image $command &
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
