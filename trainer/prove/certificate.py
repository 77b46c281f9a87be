"""Certificates: what a proof compared and found, kept in the cache by recipe, options and what the model shrinks to."""

import contextlib
import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from shardwright.arguments.data_options import DataArguments
from shardwright.arguments.output_options import OutputArguments
from shardwright.errors import UserError, command
from shardwright.files.cache import cache_path, digest
from shardwright.files.folder import Folder
from shardwright.hosts.versions import other_versions
from shardwright.job import Job
from shardwright.prove.small_job import small_config, small_mesh

FOLDER = "certificates"
# options that a proof does not depend on: data, outputs, lengths, and what is in the recipe or the config
_OTHER = {each.name for group in (DataArguments, OutputArguments) for each in fields(group)} - {"isolate_documents"}
_OTHER |= {"recipe", "model", "revision", "from_scratch", "tokenizer", "mesh", "compute", "bf16", "seed"}
_OTHER |= {"per_device_train_batch_size", "num_train_epochs", "max_steps", "learning_rate", "asked_batch"}
_OTHER |= {"steps_of_epochs", "teacher", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "adapter_format"}


@dataclass(frozen=True)
class Subject:
    """The three things that a certificate is of."""

    recipe: str  # a hash of its tables, mesh and compute policy
    options: dict[str, Any]  # those that change numbers and are not the default
    family: str
    model: str  # a hash of the shrunk config: the family with its special cases

    @property
    def key(self) -> str:
        return digest([self.recipe, self.options, self.family, self.model])


def subject_of(job: Job) -> Subject:
    """Raises UserError if the model can't be shrunk."""
    config = small_config(job)
    recipe = {name: value for name, value in job.recipe.as_dict().items() if name not in ("name", "model")}
    recipe["compute"] = {**recipe["compute"], "remat": ""}  # it changes no number, and `auto` is resolved in a run
    defaults = {each.name: each.default for each in fields(job.args)}
    options = {
        name: value
        for name, value in job.args.as_dict().items()
        if name not in _OTHER and value != defaults[name] and value != ""
    }
    if options.get("lora_alpha") == 2 * options.get("lora_r", 0):
        del options["lora_alpha"]  # as it is by default
    if job.adapter_held:
        options["adapter"] = digest([json.dumps(job.adapter_held, default=str)])  # wherever it is
    if options.get("gradient_accumulation_steps"):
        options["gradient_accumulation_steps"] = 2  # several; a run that goes on elsewhere may have another number
    values = config.to_dict()
    for name in ("transformers_version", "_name_or_path", "architectures", "dtype"):
        values.pop(name, None)
    recipe["proved on"] = small_mesh(job.plan.mesh)  # of an axis that splits nothing it proves nothing
    content = json.loads(json.dumps([recipe, values], default=str, sort_keys=True))
    return Subject(digest([content[0]]), options, str(values["model_type"]), digest([content[1]]))


def write(subject: Subject, content: dict[str, Any], page: str) -> tuple[Path, Path]:
    """Writes the certificate as JSON and as a page, each whole or not at all; returns their paths."""
    folder, texts = cache_path() / FOLDER, {".json": json.dumps(content, indent=2) + "\n", ".html": page}
    Folder(folder).write_each({subject.key + suffix: text.encode() for suffix, text in texts.items()})
    return folder / f"{subject.key}.json", folder / f"{subject.key}.html"


def said_of(job: Job) -> str | None:
    """A line for a run's start on the certificate of its recipe, options and model; None: it can have none."""
    try:
        subject = subject_of(job)
        path = cache_path() / FOLDER / f"{subject.key}.json"
    except (UserError, OSError):
        return None
    found: Any = None
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
    if not isinstance(found, dict) or not {"proved", "date", "versions"} <= found.keys():
        return f"none for this recipe, model and these options; {command('prove')} with the same options makes one"
    page = path.with_suffix(".html")
    if not found["proved"]:
        return f"NOT proved on {found['date']}: {page}"
    other = other_versions(found["versions"])
    return f"proved on {found['date']}" + (f", before: {'; '.join(other)}" if other else "") + f" ({page})"
