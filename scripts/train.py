"""Train a causal language model by a sharding recipe: python scripts/train.py --recipe mixtral_ep"""

from __future__ import annotations

import os
import sys

import transformers
from transformers import HfArgumentParser

from trainer.arguments import TrainingArguments
from trainer.errors import exit_code

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended


def main() -> int:
    parser = HfArgumentParser(TrainingArguments, description=__doc__)  # type: ignore[arg-type]
    (args,) = parser.parse_args_into_dataclasses()
    # XLA's C++ log tells of its own deprecations at every compile; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

    # what they would report here, the run says itself: progress, and weights that do not fit
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    from trainer.job import run

    return INTERRUPTED if run(args).interrupted else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
