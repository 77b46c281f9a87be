"""Write a training checkpoint's weights in the hub's format; needs no device, and holds one parameter at a time.

python scripts/export.py --checkpoint output/mixtral_ep/checkpoint-100 --output my-model
python scripts/export.py --checkpoint runs/lora/checkpoint-100 --output my-model --merge   # else the adapter alone
"""

import os
import sys

# An export touches no device: transformers must not load torch_xla, which takes time and picks one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import Terminal, say

DTYPES = ("float32", "bfloat16")


def parser() -> Parser:
    found = Parser(__doc__)
    add = found.add_argument
    keys = "names and shapes as the family's checkpoints on the hub have them (original), or as transformers 5 has "
    keys += "them in memory, experts fused (new); from_pretrained loads both (original)"
    formats = "of an adapter; default: as the run would write it"
    add("--checkpoint", required=True, help="a run's checkpoint-N: a folder, or a store's gs://…, s3://…")
    add("--output", required=True, help="where to write: a new or empty folder, or a store's")
    add("--key_format", choices=["original", "new"], default="original", help=keys)
    add("--max_shard_size", default="5GB", help="of a file of weights (5GB)")
    add("--merge", action="store_true", help="of an adapter and its model make a plain model")
    add("--adapter_format", choices=["peft", "per_expert"], help=formats)
    add("--dtype", choices=DTYPES, help="what to write; default: what the checkpoint holds")
    return found


def main() -> None:
    arguments = parser().parse_args()
    import torch
    import transformers

    from shardwright.checkpoint.read import RunCheckpoint
    from shardwright.files.folder import TEMPORARY, Folder
    from shardwright.model.facts import facts_of
    from shardwright.model.lora_options import read_config
    from shardwright.weights.adapter_weights import merge_factors
    from shardwright.weights.hub_read import open_hub_weights, reopen_hub_weights
    from shardwright.weights.hub_write import ExportFormat, export
    from shardwright.weights.peft_files import AdapterFiles, save_adapter
    from shardwright.weights.weight_sources import means_weights, part_and_rest, part_of, seeded_init

    transformers.logging.set_verbosity_error()
    console = Terminal()
    dtype = getattr(torch, arguments.dtype) if arguments.dtype else None
    form = ExportFormat(arguments.key_format, arguments.max_shard_size, dtype)
    output = Folder(arguments.output)
    if there := [name for name in output.names() if name != TEMPORARY]:
        raise UserError(
            asked=f"--output {output}",
            found=f"a folder that holds {len(there)} entries",
            why="an export never writes over what another left",
            instead="another --output, or an empty folder",
        )
    saved = RunCheckpoint(Folder(arguments.checkpoint))
    config = saved.config
    base = config.name_or_path = saved.arguments.get("model") or ""  # the generation config comes from there
    facts = facts_of(config, saved.arguments.get("train_mtp", False))
    model, whole, names = facts.model, facts.whole, facts.names_in_whole
    lora = read_config(saved.folder, model) if saved.has_adapter else None
    if arguments.merge and lora is None:
        raise UserError(
            asked="--merge",
            found=f"no adapter in {saved.folder}",
            why="its weights are those of a plain model already",
            instead="no --merge",
        )
    saved.check_model(facts.adapted(lora), config)
    rest = seeded_init(whole, saved.arguments.get("seed", 0))
    hub = None
    started = means_weights(base, saved.arguments.get("from_scratch", False))
    if started and (facts.is_part or arguments.merge):
        rest = hub = open_hub_weights(base, whole)  # what was not trained is in no checkpoint of the run
    elif base and saved.host.get("untrained", 0) > 0 and lora is None:
        hub = reopen_hub_weights(base, whole, console)
    saved.check_tensors(console)
    with output.filling() as folder:
        if lora is not None and not arguments.merge:
            per_expert = (arguments.adapter_format or saved.arguments.get("adapter_format")) == "per_expert"
            files = AdapterFiles(lora, model, whole, names, base or None, per_expert)
            save_adapter(folder, files, saved, saved.tokenizer, console)
        else:
            own = merge_factors(part_of(rest, names), saved, lora, model) if lora else saved
            source = part_and_rest(own, rest, names)
            export(folder, whole, source, saved.tokenizer, form, console, hub.untrained if hub else None)
    say(console, f"written to {output}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
