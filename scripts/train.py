"""Train a causal language model by a sharding recipe: python scripts/train.py --recipe mixtral_ep"""

import os
import sys

from shardwright.arguments.command_line import parse
from shardwright.arguments.run_file import with_files
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import BUG, INTERRUPTED, LOST, PREEMPTED
from shardwright.hosts.output_streams import exit_code
from shardwright.xla import light_imports

EXIT_CODES = f"""Exit codes:
  0    done
  2    something asked for can't be
  {BUG}   an error that nobody foresaw, which the same command would meet again
  {PREEMPTED}   SIGTERM came, and what was learned is in a checkpoint: go on with --resume_from_checkpoint latest
  {LOST}   a host was lost, a store failed for now, or nothing moved for --hang_timeout: start the same command again
  {INTERRUPTED}  Ctrl-C
"""
COMPILE_ONLY = {
    "--compile_only": "Compile the step for --topology, train nothing: the same as scripts/compile.py, "
    "whose --help says more."
}


def main() -> int:
    words = [word for word in sys.argv[1:] if word not in ("--compile_only", "--compile-only")]
    if len(words) < len(sys.argv[1:]):  # before anything opens a device
        from shardwright.compile.compile_command import main as compile_only

        return compile_only(words, "Compile the step for a TPU, and train nothing.")
    from shardwright.hosts.restarts import Restarts, asked_limit, follow_supervisor

    told = follow_supervisor(os.environ)
    if told is None and (limit := asked_limit(with_files(words))):
        from shardwright.hosts.supervisor import supervise

        return supervise(limit, words)
    with light_imports.uncollected():
        (args,) = parse([TrainingArguments], words, __doc__, EXIT_CODES, COMPILE_ONLY)
        import transformers

        from shardwright.run import train

    # what they would report here, the run says itself: progress, and weights that do not fit
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    stop = train(args, restarts=None if told is None else Restarts(args.max_restarts, told)).stop
    return PREEMPTED if stop.preempted else INTERRUPTED if stop.interrupted else 0


if __name__ == "__main__":
    sys.exit(exit_code(main))
