"""Compile the graphs that a run would, for a TPU slice that need not be here, and say whether they fit.

python scripts/compile.py --recipe mixtral_ep --model docs/configs/mixtral_8x7b.json --topology v5p:4x4x4 \
    --per_device_train_batch_size 4 --sequence_length 4096

Exit code 0: every graph fits; 3: one does not; 2: one can't be compiled. Takes all
options of scripts/train.py. Needs libtpu (pip install 'shardwright[tpu]') and no TPU. Whatever it says of time is an
estimate.
"""

import sys

from shardwright.hosts.output_streams import exit_code


def main() -> int:
    from shardwright.compile.compile_command import main as run

    return run(sys.argv[1:], __doc__)


if __name__ == "__main__":
    sys.exit(exit_code(main))
