"""Measure a model by lm-evaluation-harness's tasks, on its mesh and with no export.

python scripts/evaluate.py --model output/mixtral_ep/model --recipe mixtral_ep --tasks arc_easy,hellaswag --limit 100
python scripts/evaluate.py --model output/mixtral_ep/checkpoint-100 --recipe mixtral_ep --tasks wikitext
python scripts/evaluate.py --model runs/chat/model --tasks mine --include_path my_tasks --output_path results.json
"""

import logging
import sys

from shardwright.arguments.command_line import parse
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.hosts.output_streams import exit_code


def main() -> None:
    # XLA's C++ log tells of its own deprecations at every compile; errors still show
    (options,) = parse([EvaluationArguments], sys.argv[1:], __doc__)
    import transformers

    from shardwright.evaluation.evaluation_command import run

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    logging.getLogger("lm_eval").setLevel(logging.ERROR)  # it warns of every default that a task leaves to it
    run(options)


if __name__ == "__main__":
    sys.exit(exit_code(main))
