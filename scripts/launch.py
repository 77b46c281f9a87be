"""Start scripts/train.py on the hosts of TPU slices, or show how: files and commands for one of five targets.

python scripts/launch.py jobset --topology v5p:2x2x4 --image IMAGE -- --recipe mixtral_ep --output_dir gs://bucket/run
python scripts/launch.py xpk --topology v5p:2x2x4 --slices 2 --image IMAGE --cluster CLUSTER --run -- --recipe …

The first word is the target: xpk, jobset, skypilot, tpu-vm or ray. What follows the `--` are the options of
scripts/train.py. Nothing is started without --run. docs/launch.md says what is set, and why.
"""

import os
import sys

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.hosts.output_streams import exit_code


def main() -> int:
    from shardwright.launch.launch_command import main as run

    return run(sys.argv[1:], __doc__)


if __name__ == "__main__":
    sys.exit(exit_code(main))
