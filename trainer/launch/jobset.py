"""A JobSet for GKE: a Job a slice, a pod a host."""

from typing import Any

from shardwright.launch.exits import FINAL
from shardwright.launch.launch_plan import LaunchPlan, as_yaml
from shardwright.launch.request import Request
from shardwright.launch.slices import chips_per_host, generation, shape

_SLICE, _CONTAINER, _FILE, _POLICY = "slice", "train", "jobset.yaml", "networkpolicy.yaml"


def plan(request: Request) -> LaunchPlan:
    """The JobSet, its network's policy and the ``kubectl`` commands."""
    name = request.name
    return LaunchPlan(
        files={_FILE: as_yaml(manifest(request)), _POLICY: as_yaml(network_policy(request))},
        commands=[["kubectl", "apply", "--filename", _POLICY, "--filename", _FILE]],
        afterwards=[
            ["kubectl", "logs", "--follow", f"job/{name}-{_SLICE}-0", "--container", _CONTAINER],
            ["kubectl", "delete", "jobset,networkpolicy", name],
        ],
    )


def network_policy(request: Request) -> dict[str, Any]:
    """Lets only the JobSet's own pods connect to them."""
    own = {"matchLabels": {"jobset.sigs.k8s.io/jobset-name": request.name}}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": request.name},
        "spec": {"podSelector": own, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": own}]}]},
    }


def manifest(request: Request) -> dict[str, Any]:
    """The JobSet as a Kubernetes manifest.

    A pod with a final exit code fails its Job by the pod failure policy, which fails the JobSet. After any other failed
    pod the JobSet restarts all Jobs: a slice can't run without one of its hosts.
    """
    metadata: dict[str, Any] = {"name": request.name}
    if request.queue:
        metadata["labels"] = {"kueue.x-k8s.io/queue-name": request.queue}
    # one node pool for each slice's pods
    metadata["annotations"] = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
    failed = {"name": "final", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    final = {"containerName": _CONTAINER, "operator": "In", "values": list(FINAL)}
    job = {
        "parallelism": request.hosts,
        "completions": request.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": final}]},
        "template": _pod(request),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": request.max_restarts, "rules": [failed]},
            "replicatedJobs": [{"name": _SLICE, "replicas": request.topology.slices, "template": {"spec": job}}],
        },
    }


def _pod(request: Request) -> dict[str, Any]:
    selector = {
        "cloud.google.com/gke-tpu-accelerator": generation(request.topology).gke,
        "cloud.google.com/gke-tpu-topology": shape(request.topology),
    }
    if request.spot:
        selector["cloud.google.com/gke-spot"] = "true"
    container: dict[str, Any] = {
        "name": _CONTAINER,
        "image": request.image,
        # no shell, so that SIGTERM reaches the program
        "command": [_literal(word) for word in request.command],
        "env": _environment(request),
        "resources": {"limits": {"google.com/tpu": chips_per_host(request.topology)}},
        "securityContext": {"privileged": True},  # TPU chips are devices of the host
    }
    pod: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": request.grace_seconds,
        "nodeSelector": selector,
        "tolerations": [{"key": "google.com/tpu", "operator": "Exists", "effect": "NoSchedule"}],
        "containers": [container],
    }
    if request.topology.slices > 1:  # slices talk over the network: the host's own is faster
        pod |= {"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"}
    volumes: dict[str, tuple[str, dict[str, Any]]] = {}
    metadata: dict[str, Any] = {}
    if request.mount is not None and request.mount.bucket:
        attributes = {"bucketName": request.mount.bucket, "mountOptions": "implicit-dirs"}
        driver = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": attributes}
        volumes["mounted"] = request.mount.path, {"csi": driver}
        # by which GKE mounts buckets
        metadata = {"metadata": {"annotations": {"gke-gcsfuse/volumes": "true"}}}
    elif request.mount is not None:
        volumes["mounted"] = request.mount.path, {"persistentVolumeClaim": {"claimName": request.mount.source}}
    if request.staging:  # the node's folder: a restart makes a new pod, without the old one's emptyDir
        volumes["staging"] = request.staging, {"hostPath": {"path": request.staging, "type": "DirectoryOrCreate"}}
    if volumes:
        container["volumeMounts"] = [{"name": name, "mountPath": path} for name, (path, _) in volumes.items()]
        pod["volumes"] = [{"name": name, **volume} for name, (_, volume) in volumes.items()]
    return metadata | {"spec": pod}


def _environment(request: Request) -> list[dict[str, Any]]:
    """Variables of each pod, beside TPU_WORKER_ID and TPU_WORKER_HOSTNAMES, which GKE adds."""
    env: list[dict[str, Any]] = [{"name": name, "value": _literal(value)} for name, value in request.variables.items()]
    # torch_xla 2.9 reads TPU_WORKER_* only with this; without it it asks a server that pods don't have
    env.append({"name": "TPU_SKIP_MDS_QUERY", "value": "true"})
    if request.topology.slices > 1:
        first = f"{request.name}-{_SLICE}-0-0.{request.name}"  # the first slice's first pod, in the JobSet's subdomain
        number = {"fieldRef": {"fieldPath": "metadata.labels['jobset.sigs.k8s.io/job-index']"}}
        env += [
            {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": first},
            {"name": "MEGASCALE_NUM_SLICES", "value": str(request.topology.slices)},
            {"name": "MEGASCALE_SLICE_ID", "valueFrom": number},
        ]
    return env


def _literal(word: str) -> str:
    """Escapes ``$(NAME)``, which Kubernetes would expand."""
    return word.replace("$(", "$$(")
