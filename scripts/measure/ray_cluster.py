"""A cluster of Ray's on this machine, with slices of two TPU hosts that have no TPU; for launch_tools.py alone.

It runs in a Python that has Ray: prints the address of its job server, and ends when its input does.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster


def main() -> None:
    slices = int(sys.argv[1])
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 1, "include_dashboard": True, "dashboard_host": "127.0.0.1"},
    )
    for number in range(slices):
        # the first of a slice's hosts comes last, as hosts do
        for worker in (1, 0):
            labels = {
                "ray.io/tpu-slice-name": f"slice-{number}",
                "ray.io/tpu-worker-id": str(worker),
                "ray.io/tpu-pod-type": "v5p-16",
                "ray.io/tpu-topology": "2x2x2",
                "ray.io/accelerator-type": "TPU-V5P",
            }
            head = {"TPU-v5p-16-head": 1} if worker == 0 else {}
            # TPU_NAME: on TPU VMs Ray reads it from the machine's record, on Kubernetes from here
            name = {"TPU_NAME": f"slice-{number}"}
            cluster.add_node(num_cpus=1, resources={"TPU": 4, **head}, labels=labels, env_vars=name)
    print(f"http://{cluster.head_node.webui_url}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
