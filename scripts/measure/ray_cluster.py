"""A cluster of Ray's on this machine, with slices of two TPU hosts that have no TPU; for launch_tools.py alone.

It runs in a Python that has Ray: prints the address of its job server, and ends when its input does.
"""

from __future__ import annotations

import sys

# a stand-in for training on a host: the first start ends like a preempted run, the second prints its place
WORKER = """
import os, pathlib, sys
names = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_SLICE_ID", "MEGASCALE_NUM_SLICES",
         "MEGASCALE_COORDINATOR_ADDRESS", "PJRT_DEVICE", "SHARDWRIGHT_COMPILED")
index = os.environ.get("MEGASCALE_SLICE_ID", "0") + "-" + os.environ["TPU_WORKER_ID"]
mark = pathlib.Path(sys.argv[1], index)
if not mark.exists():
    mark.write_text("")
    sys.exit(75)
print("worker", {name: os.environ[name] for name in names if name in os.environ}, flush=True)
"""
# one that saves at SIGTERM
SAVER = """
import os, pathlib, signal, sys, time
mark = pathlib.Path(sys.argv[1], "ready-" + os.environ["TPU_WORKER_ID"])
def save(*_):
    time.sleep(2)
    mark.with_name("saved-" + os.environ["TPU_WORKER_ID"]).write_text("")
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
mark.write_text("")
time.sleep(300)
"""


def main() -> None:
    from ray.cluster_utils import Cluster

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
