"""Say what would come of a checkpoint before it is fetched or opened: what loads, and the slice that it needs.

python scripts/check.py deepseek-ai/DeepSeek-V3.1    # its config and the headers of its files alone are fetched
python scripts/check.py path/to/folder
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.errors import command
from shardwright.hosts.output_streams import exit_code

if TYPE_CHECKING:
    from shardwright.model.facts import ModelFacts
    from shardwright.report.lines import Terminal

LORA_R = 16


def parser() -> Parser:
    found = Parser(__doc__)
    what = "a hub id, a folder, a GGUF file, or a config.json alone"
    found.add_argument("model", metavar="ID_OR_FOLDER", nargs="?", help=what)
    found.add_argument("--model", dest="named", metavar="ID_OR_FOLDER", help="the same, as scripts/train.py takes it")
    found.add_argument("--no_slices", action="store_true", help="leave out the smallest slices, which take a minute")
    found.takes_run_file()
    return found


def main() -> None:
    command_line = parser()
    arguments = command_line.parse_args()
    arguments.model = arguments.model or arguments.named
    if arguments.model is None:
        command_line.lacks("ID_OR_FOLDER")
    import transformers
    from rich.table import Table

    from shardwright.layout.auto import UNMADE
    from shardwright.model.facts import facts_of
    from shardwright.model.meta_model import load_config
    from shardwright.report.lines import Terminal, say, waiting
    from shardwright.report.units import size
    from shardwright.weights.preflight import contents

    transformers.logging.set_verbosity_error()
    console = Terminal()
    with waiting(console, "reading config and headers …"):
        facts = facts_of(load_config(arguments.model, UNMADE))
        rows, refused = contents(arguments.model, facts.whole)
    say(console, f"model:   {type(facts.model).__name__}, {facts.parameters:,} parameters")
    table = Table("what", "tensors", "in the files", "names", title=arguments.model)
    for row in rows:
        table.add_row(row.what, f"{row.tensors:,}", size(row.bytes), row.names)
    if rows:
        console.print(table)
    if refused is not None:
        raise refused
    if not arguments.no_slices:
        _print_slices(facts, arguments.model, console)


def _print_slices(facts: ModelFacts, model: str, console: Terminal) -> None:
    """Prints the smallest slice of each generation that trains all weights, and an adapter."""
    from rich.table import Table

    from shardwright.arguments.adapter_options import SAME
    from shardwright.arguments.training import TrainingArguments
    from shardwright.launch.smallest_slice import SHARE, smallest_slices
    from shardwright.layout.auto import AUTO
    from shardwright.model.base_storage import published, quantization_settings
    from shardwright.report.lines import say, waiting
    from shardwright.report.units import size

    table = Table("training", "generation", "smallest slice", "chips", "a chip holds")
    lora = f"LoRA of rank {LORA_R}"
    kinds: list[tuple[str, int | None, str]] = [("all weights", None, "bfloat16"), (lora, LORA_R, "bfloat16")]
    if published(quantization_settings(facts.config)):
        kinds.append((f"{lora}, --base_dtype {SAME}", LORA_R, SAME))
    for title, lora_r, stored in kinds:
        args = TrainingArguments(recipe=AUTO, model=model, num_train_epochs=1, lora_r=lora_r, base_dtype=stored)
        with waiting(console, f"planning {title} …"):
            found = list(smallest_slices(facts, args))
        for chip, fit in found:
            if fit is None:
                table.add_row(title, chip.name, "more than a pod", "", "")
                continue
            each = " in each half" if chip.devices > 1 else ""
            chips = str(fit.topology.devices // chip.devices)
            table.add_row(title, chip.name, fit.topology.name, chips, f"{size(fit.bytes_a_chip)}{each}")
    console.print(table)
    say(
        console,
        f"estimates: weights, gradients and optimizer state as recipe {AUTO} lays them out, in at most {SHARE:.0%} of "
        f"a chip's memory; {command('compile')} says whether a step fits",
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
