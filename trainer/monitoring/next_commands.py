"""Commands for what a run leaves: load it, export a checkpoint, evaluate it, go on."""

import shlex
from collections.abc import Collection

from shardwright.arguments.run_file import RUN_FILE
from shardwright.checkpoint.lineage import folder_of
from shardwright.errors import command
from shardwright.files.folder import Folder
from shardwright.job import Job

MODEL = "model"


def next_commands(
    job: Job, folder: Folder, step: int, saved: int | None, there: Collection[str]
) -> list[tuple[str, str]]:
    """(what for, the line) for the files ``there`` in the output ``folder``, after ``step``.

    ``saved`` is the step of the last checkpoint. Lines are the shell's; the first is Python.
    """
    model, recipe, found = str(folder / MODEL), shlex.quote(job.args.recipe), []
    base = job.args.model or model
    if MODEL in there:
        whole = job.facts.whole  # a class of its own where the trained part is a multimodal model's
        kind = "SequenceClassification" if job.facts.scores_texts else "CausalLM"
        package, name = "transformers", f"AutoModelFor{kind}" if whole is job.facts.model else type(whole).__name__
        if job.lora is not None:
            package, name = "peft", f"AutoPeftModelFor{kind}"
        line = f"from {package} import {name}\nmodel = {name}.from_pretrained({model!r})"
        found.append(("Load it (Python)", line))
        if not job.facts.scores_texts:
            what = f"--model {shlex.quote(base)} --adapter {shlex.quote(model)}" if job.lora is not None else ""
            what = what or f"--model {shlex.quote(model)}"
            found.append(("Evaluate it", f"{command('evaluate')} {what} --recipe {recipe} --tasks arc_easy"))
    if saved is not None:
        checkpoint = shlex.quote(str(folder_of(folder, saved)))
        found.append(("Export a checkpoint", f"{command('export')} --checkpoint {checkpoint} --output my-model"))
        further = "" if step < job.args.max_steps else f" --max_steps {2 * step}"
        go_on = f"{command('train')} --config {shlex.quote(str(folder / RUN_FILE))} --resume_from_checkpoint latest"
        found.append(("Go on", go_on + further))
    return found
