"""Train a causal language model by a sharding recipe: python scripts/train.py --recipe mixtral_ep"""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

from trainer.errors import INTERRUPTED, PREEMPTED, did_you_mean, exit_code

EXIT_CODES = (
    f"Exit codes: 0 done; 2 something asked for can't be; {PREEMPTED} SIGTERM came and a checkpoint was written (go on "
    f"with --resume_from_checkpoint latest); {INTERRUPTED} Ctrl-C."
)


def main() -> int:
    others = [word for word in sys.argv[1:] if word not in ("--compile_only", "--compile-only")]
    if len(others) < len(sys.argv[1:]):  # before anything opens a device
        from trainer.compile.command import main as compile_only

        return compile_only(others, "Compile the step for a TPU, and train nothing.")
    # XLA's C++ log tells of its own deprecations at every compile; errors still show
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
    logging.disable(logging.WARNING)  # "Defaulting to PJRT_DEVICE=CPU": the run says which devices it takes
    import transformers

    from trainer.arguments import TrainingArguments

    kinds: Any = TrainingArguments
    parser = transformers.HfArgumentParser(kinds, description=__doc__, epilog=EXIT_CODES)
    parser.add_argument(
        "--compile_only",
        action="store_true",
        help="Compile the step for --topology, train nothing: the same as scripts/compile.py, whose --help says more.",
    )
    args, _, unknown = parser.parse_args_into_dataclasses(return_remaining_strings=True)
    if unknown:
        known = [option for action in parser._actions for option in action.option_strings]
        parser.error(f"no option {unknown[0]}; {did_you_mean(unknown[0], known)}--help lists them")
    from trainer.run import run

    logging.disable(logging.NOTSET)
    # what they would report here, the run says itself: progress, and weights that do not fit
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    stop = run(args).stop
    return PREEMPTED if stop.preempted else INTERRUPTED if stop.interrupted else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
