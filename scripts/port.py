"""Translate a published command or YAML file of transformers, trl, axolotl or LLaMA-Factory, and say what became of it.

python scripts/port.py train.sh                        # `accelerate launch … sft.py --…`, `trl sft …`, …
python scripts/port.py config.yaml --write run.yaml    # then: python scripts/train.py --config run.yaml

Nothing is read but that file, and the YAML files that it names. docs/reference/flags.md has the whole table.
"""

import os
import sys

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.errors import command
from shardwright.files.asked_file import check_new, write_asked
from shardwright.hosts.output_streams import exit_code


def parser() -> Parser:
    found = Parser(__doc__)
    found.add_argument("file", metavar="FILE", help="a shell script with the command, or a YAML or JSON file")
    found.add_argument("--write", metavar="RUN_YAML", help="write the options to this new file, for --config")
    return found


def main() -> None:
    arguments = parser().parse_args()
    if arguments.write is not None:
        check_new(arguments.write, "--write", "run.yaml")
    from rich.table import Table

    from shardwright.arguments.known_flags.entry import MISSING
    from shardwright.arguments.known_flags.translate import NO_OPTION
    from shardwright.arguments.port.port import ported
    from shardwright.arguments.port.published import read_published
    from shardwright.arguments.training import TrainingArguments
    from shardwright.report.lines import Terminal, say

    found, console = ported(read_published(arguments.file)), Terminal()
    table = Table("theirs", "value", "here", title=arguments.file)
    for name, value, became in found.rows:
        table.add_row(name, f"{value:.60}", became)
    console.print(table)
    if found.launcher:
        say(console, f"{' '.join(found.launcher)}: not needed, devices and layout are the recipe's (docs/launch.md)")
    lost = [each for each in found.outcomes if each.kind in (MISSING, NO_OPTION)]
    say(console, f"{len(found.outcomes) - len(lost)} of {len(found.outcomes)} arguments carried over")
    if found.batch:
        say(console, found.batch)
    if "dataset" not in found.options:
        say(console, "no dataset is named that can be taken as it is: give --dataset")
    TrainingArguments(**found.options)  # refuses what can't be together
    if arguments.write is None:
        say(console, f"\n{found.command}")
    else:
        write_asked(arguments.write, "--write", found.text, new=True)
        say(console, f"\nwritten to {arguments.write}; train with it:\n  {command('train')} --config {arguments.write}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
