"""Write a training checkpoint's weights in the hub's format; needs no device, and holds one parameter at a time.

python scripts/export.py --checkpoint output/mixtral_ep/checkpoint-100 --output my-model
python scripts/export.py --checkpoint runs/lora/checkpoint-100 --output my-model --merge   # else the adapter alone
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
from typing import TYPE_CHECKING, Any

# An export touches no device: transformers must not load torch_xla, which takes time and picks one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import Terminal, say

if TYPE_CHECKING:
    from collections.abc import Mapping

    from shardwright.files.folder import Folder


def parser() -> Parser:
    found = Parser(__doc__)
    add = found.add_argument
    keys = "names and shapes as the family's checkpoints on the hub have them (original), or as transformers 5 has "
    keys += "them in memory, experts fused (new); from_pretrained loads both (original)"
    formats = "of an adapter; default: as the run would write it"
    written = (
        "bf16 or fp32; fp8 (in blocks), mxfp4 (gpt-oss) or int4 (compressed-tensors): linear weights are quantized, "
    )
    written += "and their error is told; same: as the run's --model is published. Default: in the dtype of --model's "
    written += "weights, bf16 where they are quantized"
    add("--checkpoint", required=True, help="a run's checkpoint-N: a folder, or a store's gs://…, s3://…")
    add("--output", required=True, help="where to write: a new or empty folder, or a store's")
    add("--key_format", choices=["original", "new"], default="original", help=keys)
    add("--max_shard_size", default="5GB", help="of a file of weights (5GB)")
    add("--merge", action="store_true", help="of an adapter and its model make a plain model")
    add("--adapter_format", choices=["peft", "per_expert"], help=formats)
    add("--format", choices=["bf16", "fp32", "fp8", "mxfp4", "int4", "same"], help=written)
    found.takes_run_file()
    return found


def main() -> None:
    arguments = parser().parse_args()
    import transformers

    from shardwright.checkpoint.read import RunCheckpoint
    from shardwright.files.folder import TEMPORARY, Folder
    from shardwright.model.adapted_weights import Part
    from shardwright.model.facts import facts_of
    from shardwright.model.meta_model import means_weights
    from shardwright.model.peft_config import read_config
    from shardwright.model.trained_rows import rows_needed
    from shardwright.weights.adapter_weights import merge_factors
    from shardwright.weights.formats.plain_weights import base_dtype
    from shardwright.weights.hub_read import open_hub_weights, reopen_hub_weights
    from shardwright.weights.hub_write import ExportFormat, export, kept_in_float32
    from shardwright.weights.peft_files import AdapterFiles, save_adapter
    from shardwright.weights.weight_sources import in_dtype, part_and_rest, part_of, seeded_init

    transformers.logging.set_verbosity_error()
    console = Terminal()
    form = ExportFormat(arguments.key_format, arguments.max_shard_size, arguments.format)
    output = Folder(arguments.output)
    if there := [name for name in output.names() if name != TEMPORARY]:
        raise UserError(
            asked=f"--output {output}",
            found=f"a folder that holds {len(there)} entries",
            why="an export never writes over what another left",
            instead="another --output, or an empty folder",
        )
    for folder in (output, output.parent):
        _check_no_run(folder, output)
    saved = RunCheckpoint(Folder(arguments.checkpoint))
    config = saved.config
    base = config.name_or_path = saved.arguments.get("model") or ""  # the generation config comes from there
    facts = facts_of(config, saved.arguments.get("train_mtp", False))
    model, whole, names = facts.model, facts.whole, facts.names_in_whole
    lora = read_config(saved.folder, Part(model, model), checkpoint=True) if saved.has_adapter else None
    _check_adapter(arguments, lora is not None)
    saved.check_model(facts.adapted(lora), config)
    seed = saved.arguments.get("seed", 0)
    rest = seeded_init(whole, seed)
    hub = None
    started = means_weights(base, saved.arguments.get("from_scratch", False))
    if started and (facts.is_part or arguments.merge):
        # what was not trained is in no checkpoint of the run
        rest = hub = open_hub_weights(base, whole, console, seed, rows_needed(lora, facts.part))
        if text := hub.changed(saved.host):
            say(console, f"warning: {text}")
    elif base and lora is None and (_asks_base(saved.host) or (started and form.asks_base)):
        hub = reopen_hub_weights(base, whole, console, seed)
    saved.check_tensors(console)
    with output.filling() as folder:
        if lora is not None and not arguments.merge:
            per_expert = (arguments.adapter_format or saved.arguments.get("adapter_format")) == "per_expert"
            files = AdapterFiles(lora, model, whole, names, base if started else None, per_expert)
            save_adapter(folder, files, saved, saved.tokenizer, console)
        else:
            own = merge_factors(part_of(rest, names), saved, lora, model) if lora else saved
            if lora is None and (form.format is None or (form.format == "same" and hub is None)):
                kept = kept_in_float32(whole, hub)
                own = in_dtype(own, base_dtype(config), lambda name: kept(names.get(name, name)))
            source, plain = part_and_rest(own, rest, names), copy.deepcopy(whole)  # whose config is written to
            if (generation := saved.generation) is not None:
                plain.generation_config = generation
            export(folder, plain, source, saved.tokenizer, form, console, hub)
    say(console, f"written to {output}")


def _asks_base(host: Mapping[str, Any]) -> bool:
    """Whether a checkpoint of this host state is exported with the files of its base, though all of it is trained."""
    return bool(host.get("untrained") or host.get("says_how"))


def _check_no_run(folder: Folder, output: Folder) -> None:
    """Refuse an ``output`` in the ``folder`` of a living run, which writes its own model there when it ends."""
    from shardwright.files.folder import StorageError
    from shardwright.files.lock import FolderLock

    try:
        FolderLock(folder, Terminal()).check_free()
    except UserError as error:
        if isinstance(error, StorageError):
            raise
        raise error.retold(
            asked=f"--output {output}",
            why="it writes its own model there when it ends",
            instead="another --output, or the same command once that run has ended",
        ) from error


def _check_adapter(arguments: argparse.Namespace, adapter: bool) -> None:
    """Refuse options that mean nothing for a checkpoint with, or without, an ``adapter``."""
    if arguments.merge and not adapter:
        raise UserError(
            asked="--merge",
            found=f"no adapter in {arguments.checkpoint}",
            why="its weights are those of a plain model already",
            instead="no --merge",
        )
    if arguments.format and adapter and not arguments.merge:
        raise UserError(
            asked=f"--format {arguments.format}",
            found=f"an adapter in {arguments.checkpoint}",
            why="its factors are written as PEFT has them, beside a base that stays as it is",
            instead="--merge, which makes a plain model of both; or no --format",
        )


if __name__ == "__main__":
    sys.exit(exit_code(main))
