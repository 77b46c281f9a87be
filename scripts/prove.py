"""Say whether a recipe trains right, with your model and your options; needs no TPU, no weights, and two minutes:

python scripts/prove.py --recipe mixtral_ep
python scripts/prove.py --recipe my_recipe.py --model DIR_OR_HUB_ID --lora_r 16

It takes the options of scripts/train.py. The model is shrunk, its special cases kept, and trained for ten steps on
virtual CPU devices, beside the plain model of transformers (and PEFT's factors). The certificate, JSON and a page, lies
in the folder `certificates` of the cache ($SHARDWRIGHT_CACHE, else ~/.cache/shardwright), where scripts/train.py looks
for it.
"""

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shardwright.arguments.command_line import parse
from shardwright.arguments.option_values import Checked, check_values, option
from shardwright.arguments.training import TrainingArguments
from shardwright.hosts.output_streams import exit_code

EXIT_CODES = """Exit codes:
  0    proved
  2    something asked for can't be, or can't be proved
  3    not proved: some number is off by more than rounding
"""
# the step runs but ten times: compiling is most of the time
QUICK = (
    "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false --xla_llvm_disable_expensive_passes=true"
)


@dataclass
class ProveArguments(Checked):
    """Options of a proof."""

    devices: int = option(8, "Devices of the run, whose layouts are checked at full size; the proof itself runs on 8.")

    def __post_init__(self) -> None:
        check_values(self)
        self.at_least(1, "it counts devices", "devices", instead=8)


def main() -> int:
    own, args = parse([ProveArguments, TrainingArguments], sys.argv[1:], __doc__, EXIT_CODES)
    with tempfile.TemporaryDirectory(prefix="shardwright-prove-") as folder:
        dump = f"--xla_dump_to={folder} --xla_dump_hlo_as_text --xla_dump_hlo_module_re=Sync.*"
        os.environ.update(PJRT_DEVICE="CPU", OMP_NUM_THREADS="1", TF_CPP_MIN_LOG_LEVEL="2")
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {QUICK} {dump}".strip()
        import transformers

        from shardwright.prove.prove_command import prove
        from shardwright.report.lines import Terminal

        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        return prove(args, own.devices, Terminal(), Path(folder))


if __name__ == "__main__":
    sys.exit(exit_code(main))
