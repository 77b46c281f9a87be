"""Read all of a dataset as a run would, on any machine, and say what would train wrongly:

python scripts/data.py --dataset chats.jsonl --model DIR_OR_HUB_ID --html audit.html

It takes the options of scripts/train.py; those of data, --model, --tokenizer and --recipe count.
"""

import os
import sys

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.data.audit_arguments import AuditArguments
from shardwright.hosts.output_streams import exit_code

EXIT_CODES = """Exit codes:
  0    all is fine
  2    something asked for can't be
  3    something would train wrongly, or stop the run
"""


def main() -> int:
    shown, args = parse([AuditArguments, TrainingArguments], sys.argv[1:], __doc__, EXIT_CODES)
    import transformers

    from shardwright.data.audit_command import run_audit
    from shardwright.report.lines import Terminal

    transformers.logging.set_verbosity_error()
    return run_audit(args, shown, Terminal())


if __name__ == "__main__":
    sys.exit(exit_code(main))
