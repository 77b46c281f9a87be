"""Commands for what a run leaves: load it, evaluate it, export a checkpoint, go on."""

import math
import os
import shlex
from collections.abc import Collection

from shardwright.arguments.run_file import RUN_FILE
from shardwright.checkpoint.lineage import folder_of
from shardwright.errors import command
from shardwright.files.folder import Folder
from shardwright.files.hub_names import split
from shardwright.job import Job
from shardwright.weights.weight_files import GGUF
from shardwright.xla.chips import Chip, topologies

MODEL = "model"


def next_commands(job: Job, folder: Folder, step: int, saved: int | None, there: Collection[str]) -> dict[str, str]:
    """The commands that come next, purpose → line, for the files ``there`` in the output ``folder``, after ``step``.

    ``saved`` is the step of the last checkpoint. Lines are the shell's; that of ``load`` is Python.
    """
    args, model, found = job.args, str(folder / MODEL), dict[str, str]()
    adapter = job.lora is not None
    if MODEL in there and (args.model or not adapter):  # an adapter of the recipe's own random weights fits none
        scores, whole = job.facts.scores_texts, job.facts.whole
        kind = "AutoModelForSequenceClassification" if scores else "AutoModelForCausalLM"
        if whole is not job.facts.model:  # the trained part is a multimodal model's, which has a class of its own
            kind = type(whole).__name__
        load = f'{kind}.from_pretrained("{model}")'
        if adapter and args.model:
            base, commit = split(args.model)
            place, file = os.path.split(base) if base.endswith(GGUF) else (base, "")
            given = "".join(
                f', {name}="{value}"' for name, value in (("gguf_file", file), ("revision", commit)) if value
            )
            base = f'{kind}.from_pretrained("{place or "."}"{given}{", num_labels=1" * scores})'
            load = f'PeftModel.from_pretrained({base}, "{model}")'
        imports = f"from transformers import {kind}; " + "from peft import PeftModel; " * adapter
        found["load"] = f"{imports}model = {load}"
        if not scores:
            words = ["--model", model, "--recipe", args.recipe]
            words += ["--mesh", args.mesh] if args.mesh else []
            words += ["--base_dtype", args.base_dtype] if args.base_dtype != "bfloat16" else []
            found["evaluate"] = f"{command('evaluate')} {shlex.join(words)} --tasks arc_easy"
    if saved is not None:
        checkpoint, run = (shlex.quote(str(path)) for path in (folder_of(folder, saved), folder / RUN_FILE))
        merged = " --merge" if adapter else ""
        further = "" if step < args.max_steps else f" --max_steps {2 * step}"
        found["export"] = f"{command('export')} --checkpoint {checkpoint} --output my-model{merged}"
        found["go on"] = f"{command('train')} --config {run} --resume_from_checkpoint latest{further}"
    return found


def tune_command(job: Job, folder: Folder, chip: Chip | None) -> str | None:
    """The command that finds a faster batch, remat and mesh for the run in ``folder``; None: it is on no known slice.

    Without a TPU, by its compiler and the estimate.
    """
    count = math.prod(job.recipe.mesh.dcn.values())
    slices = [] if chip is None else [each for each in topologies(chip) if each.devices * count == job.devices]
    if not slices:
        return None
    run, several = shlex.quote(str(folder / RUN_FILE)), f" --slices {count}" if count > 1 else ""
    return f"{command('compile')} --config {run} --topology {slices[0].name}{several} --tune 60"
