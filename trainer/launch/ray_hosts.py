"""Runs a command on every host of a Ray cluster's TPU slices, and again where its exit code allows.

python -m shardwright.launch.ray_hosts --topology v5p:2x2x4 -- python scripts/train.py …

It is the driver of the job that `scripts/launch.py ray` submits. Its exit code is the run's.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from shardwright.arguments.command_line import Parser
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.launch.exits import ours
from shardwright.launch.slices import generation, shape
from shardwright.xla.chips import Topology, find_topology

_LOST = 137  # the code of a host that is gone
_PORT = 8081  # of the slices' coordinator


@dataclass(frozen=True)
class WorkerPlace:
    """Number of a worker's slice, number of its host in the slice, and its address."""

    slice_index: int
    host_index: int
    address: str


class Host:
    """A Ray actor, one on each host, whose methods run side by side."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def where(self, slice_index: int) -> WorkerPlace:
        import ray

        labels = ray.get_runtime_context().get_node_labels()
        worker = int(labels.get("ray.io/tpu-worker-id", "0"))
        return WorkerPlace(slice_index, worker, ray.util.get_node_ip_address())

    def run(self, command: list[str], environment: dict[str, str]) -> int:
        """Runs the command and returns its exit code, 128 + N where signal N ended it."""
        # in a pod torch_xla 2.9 reads TPU_WORKER_* only with this; on a TPU VM it asks a server
        pod = {"TPU_SKIP_MDS_QUERY": "true"} if "KUBERNETES_SERVICE_HOST" in os.environ else {}
        self._process = subprocess.Popen(command, env=os.environ | environment | pod)
        code = self._process.wait()
        return code if code >= 0 else 128 - code

    def stop(self, grace_seconds: int) -> None:
        """Ends the command by SIGTERM, and by SIGKILL after the grace."""
        if self._process is None or self._process.poll() is not None:
            return
        self._process.terminate()
        try:
            self._process.wait(grace_seconds)
        except subprocess.TimeoutExpired:
            self._process.kill()


def environments(places: Sequence[WorkerPlace]) -> list[dict[str, str]]:
    """The variables of the worker in each of ``places``."""
    slices = {place.slice_index for place in places}
    first = next(place for place in places if (place.slice_index, place.host_index) == (0, 0))
    found = []
    for place in places:
        own = sorted((p for p in places if p.slice_index == place.slice_index), key=lambda p: p.host_index)
        addresses = ",".join(p.address for p in own)
        variables = {"TPU_WORKER_ID": str(place.host_index), "TPU_WORKER_HOSTNAMES": addresses}
        if len(slices) > 1:
            variables |= {
                "MEGASCALE_COORDINATOR_ADDRESS": first.address,
                "MEGASCALE_PORT": str(_PORT),
                "MEGASCALE_NUM_SLICES": str(len(slices)),
                "MEGASCALE_SLICE_ID": str(place.slice_index),
            }
        found.append(variables)
    return found


def verdict(codes: Sequence[int]) -> int:
    """The exit code of a run from its hosts': a final one if there is one, else the first that is not 0."""
    bad = [code for code in codes if code != 0]
    return next((code for code in bad if not ours(code)), bad[0] if bad else 0)


class _Stop:
    """The SIGTERM of `ray job stop`: ``asked`` once it came. Its handler takes the place of Ray's, which exits."""

    asked = False

    def note(self, number: int, frame: Any) -> None:
        self.asked = True


def run_once(topology: Topology, command: list[str], grace_seconds: int, stop: _Stop) -> int:
    """Reserves the slices, runs ``command`` on each of their hosts, and returns the run's exit code."""
    import ray
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
    from ray.util.tpu import slice_placement_group

    try:
        slices = slice_placement_group(
            topology=shape(topology),
            accelerator_version=generation(topology).ray,
            num_slices=topology.slices,
            strategy="STRICT_SPREAD",  # a worker a host
            head_reservation_timeout_s=None,
        )
    except ValueError as error:  # a generation or a shape that this Ray does not know
        raise UserError(
            asked=f"{topology.slices} × {topology.name} by Ray {ray.__version__}",
            found=str(error),
            why="Ray reserves the slices that are in its own tables",
            instead="a newer Ray, another slice, or launch.py xpk or jobset",
        ) from error
    try:
        group = slices.placement_group
        ray.get(group.ready())
        # three threads: one runs the command, one stops it
        actor = ray.remote(num_cpus=0, max_concurrency=3)(Host)
        hosts = [
            actor.options(
                resources={"TPU": slices.bundle_resources["TPU"]},
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, bundle),
            ).remote()
            for bundle in range(slices.num_bundles)
        ]
        of_slice = slices.num_bundles // topology.slices
        places = ray.get([host.where.remote(i // of_slice) for i, host in enumerate(hosts)])
        variables = environments(places)
        runs = [host.run.remote(command, each) for host, each in zip(hosts, variables, strict=True)]
        return verdict(_codes(hosts, runs, grace_seconds, stop))
    finally:
        slices.shutdown()


def _codes(hosts: list[Any], runs: list[Any], grace_seconds: int, stop: _Stop) -> list[int]:
    """Each host's exit code. When one fails, or the job is to end, the others are stopped: they would wait for it."""
    import ray

    codes: dict[Any, int] = {}
    stopping = None
    while len(codes) < len(runs):
        ready, _ = ray.wait([run for run in runs if run not in codes], timeout=1)
        for run in ready:
            try:
                codes[run] = ray.get(run)
            except ray.exceptions.RayError:
                codes[run] = _LOST
        if stopping is None and (stop.asked or any(codes.values())):
            # a preemption reaches all hosts at once, and the others end by themselves
            time.sleep(0 if stop.asked else min(5, grace_seconds))
            stopping = [host.stop.remote(grace_seconds) for host in hosts]
    return [codes[run] for run in runs]


def main() -> int:
    """Runs the command until its exit code is final."""
    parser = Parser(__doc__)
    parser.add_argument("--topology", required=True, help="slice, as scripts/launch.py names it")
    parser.add_argument("--slices", type=int, default=1, help="slices (default: 1)")
    parser.add_argument("--max_restarts", type=int, default=50, help="restarts (default: 50)")
    parser.add_argument("--grace_seconds", type=int, default=30, help="seconds to save in (default: 30)")
    parser.add_argument("command", nargs="+", help="what each host runs, after a --")
    options = parser.parse_args()
    topology = find_topology(options.topology, options.slices)
    import ray

    ray.init()
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop.note)
    for restart in range(options.max_restarts + 1):
        code = run_once(topology, options.command, options.grace_seconds, stop)
        if stop.asked or not ours(code) or restart == options.max_restarts:
            break
        print(f"exit code {code}: restart {restart + 1} of {options.max_restarts}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(exit_code(main))
