"""Write a training checkpoint's weights in the hub's format; needs no device, and holds one parameter at a time.

python scripts/export.py --checkpoint output/mixtral_ep/checkpoint-300 --output my-model
"""

from __future__ import annotations

import argparse
import logging
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from rich.console import Console

from trainer.errors import UserError, exit_code

DTYPES = ("float32", "bfloat16")


def main() -> int | None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--checkpoint", required=True, help="a run's checkpoint-N: a folder, or a store's gs://…, s3://…"
    )
    parser.add_argument("--output", required=True, help="where to write: a new or empty folder, or a store's")
    parser.add_argument(
        "--key_format",
        choices=["original", "new"],
        default="original",
        help="names and shapes as the family's checkpoints on the hub have them (original), or as transformers 5 has "
        "them in memory, experts fused (new); from_pretrained loads both (original)",
    )
    parser.add_argument("--max_shard_size", default="5GB", help="of a file of weights (5GB)")
    parser.add_argument("--dtype", choices=DTYPES, help="what to write; default: what the checkpoint holds")
    arguments = parser.parse_args()
    console = Console()

    logging.disable(logging.WARNING)  # "Defaulting to PJRT_DEVICE=CPU": nothing here opens a device
    import torch
    import transformers

    from trainer.checkpoint.read import open_source
    from trainer.model import meta_model
    from trainer.storage import Folder
    from trainer.weights.hub_write import export

    logging.disable(logging.NOTSET)
    transformers.logging.set_verbosity_error()
    output = Folder(arguments.output)
    if there := output.names():
        raise UserError(
            asked=f"--output {output}",
            found=f"a folder that holds {len(there)} entries",
            why="an export never writes over what another left",
            instead="another --output, or an empty folder",
        )
    with console.status(f"checking {arguments.checkpoint} …"):
        source, saved = open_source(arguments.checkpoint)
    config = saved.config
    config.name_or_path = saved.arguments.get("model") or ""  # whose generation config goes along
    export(
        output,
        meta_model(config),
        source,
        saved.tokenizer,
        key_format=arguments.key_format,
        max_shard_size=arguments.max_shard_size,
        dtype=getattr(torch, arguments.dtype) if arguments.dtype else None,
        console=console,
    )
    console.print(f"written to {output}", highlight=False)
    return None


if __name__ == "__main__":
    sys.exit(exit_code(main))
