"""A JobSet for GKE: a Job a slice, a pod a host."""

from shardwright.launch.exits import FINAL
from shardwright.launch.launch_plan import LaunchPlan, filled
from shardwright.launch.request import Request
from shardwright.launch.slices import chips_per_host, generation, shape

_FILE, _POLICY = "jobset.yaml", "networkpolicy.yaml"
_INDEX = "batch.kubernetes.io/job-completion-index"  # Kubernetes' label of a pod, since 1.28


def plan(request: Request) -> LaunchPlan:
    """The JobSet, its network's policy and the ``kubectl`` commands."""
    where = request.topology
    # the first host's pod, which writes the log
    labels = {"jobset.sigs.k8s.io/jobset-name": request.name, "jobset.sigs.k8s.io/job-index": "0"}
    first = ",".join(f"{key}={value}" for key, value in (labels | {_INDEX: "0"}).items())
    places = {"accelerator": generation(where).gke, "shape": shape(where), "chips": chips_per_host(where)}
    return LaunchPlan(
        files={_FILE: filled(_FILE, run=request, final=FINAL, **places), _POLICY: filled(_POLICY, run=request)},
        commands=[["kubectl", "apply", "--filename", _POLICY, "--filename", _FILE]],
        afterwards=[
            ["kubectl", "logs", "--follow", "--tail=-1", "--container=train", "--selector", first],
            ["kubectl", "delete", "jobset,networkpolicy", request.name],
        ],
    )
