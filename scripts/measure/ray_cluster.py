"""A cluster of Ray's on this machine, with slices of two TPU hosts that have no TPU; for launch_tools.py alone.

It runs in a Python that has Ray: prints the address of its job server, and ends when its input does.
"""

import itertools
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
    head = {"num_cpus": 1, "include_dashboard": True, "dashboard_host": "127.0.0.1"}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    # the first of a slice's hosts comes last, as hosts do
    for number, worker in itertools.product(range(slices), (1, 0)):
        labels = {"tpu-slice-name": f"slice-{number}", "tpu-worker-id": str(worker), "tpu-pod-type": "v5p-16"}
        labels |= {"tpu-topology": "2x2x2", "accelerator-type": "TPU-V5P"}
        cluster.add_node(
            num_cpus=1,
            resources={"TPU": 4, **({"TPU-v5p-16-head": 1} if worker == 0 else {})},
            labels={f"ray.io/{name}": value for name, value in labels.items()},
            # on TPU VMs Ray reads it from the machine's record, on Kubernetes from here
            env_vars={"TPU_NAME": f"slice-{number}"},
        )
    print(f"http://{cluster.head_node.webui_url}", flush=True)
    sys.stdin.read()
    cluster.shutdown()


if __name__ == "__main__":
    main()
