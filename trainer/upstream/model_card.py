"""A model card: the README.md of a model folder, with its metadata as the hub reads it."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from huggingface_hub import ModelCardData

from shardwright.arguments.output_options import OutputArguments
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.hub_names import is_hub_name, split
from shardwright.report.units import mesh_text

FILE = "README.md"
_MARK = "<!-- Written by Shardwright, which replaces it as long as this line stands. -->"
# transformers' and trl's names of what a caller may say of a card → the metadata's, as the hub has it
_METADATA = {
    "language": "language",
    "license": "license",
    "tags": "tags",
    "model_name": "model_name",
    "finetuned_from": "base_model",
    "tasks": "pipeline_tag",
    "dataset": "datasets",
    "dataset_tags": "datasets",
    "dataset_name": "datasets",
}
_TASKS = {"reward": "text-classification"}  # objective → the hub's name of what its model does
_LISTS = ("tags", "datasets", "language")
_SAID_ELSEWHERE = {"model", "revision", "tokenizer", "dataset", "eval_dataset", "recipe", "objective"}


@dataclass(frozen=True)
class Card:
    """The facts of a run that its model card tells."""

    args: TrainingArguments
    recipe: str
    mesh: Mapping[str, int]
    base: str | None  # hub id or folder of the starting weights
    adapter: bool
    metrics: Mapping[str, float]  # of the last evaluation
    versions: Mapping[str, str]

    def text(self, name: str, **said: Any) -> str:
        """The card of a model called ``name``; ``said`` are keywords of transformers' or trl's create_model_card.

        Raises UserError for a keyword that says nothing of a card.
        """
        if other := next((key for key in said if key not in {*_METADATA, "dataset_args"}), None):
            raise UserError(
                asked=f"a model card with {other}={said[other]!r:.80}",
                found="no field of a card",
                why="these are fields that the hub or a reader knows",
                instead=", ".join([*_METADATA, "dataset_args"]),
            )
        data = self._metadata({key: value for key, value in said.items() if value is not None})
        title = data.pop("model_name", None) or name
        lines = ["---", ModelCardData(**data).to_yaml().strip(), "---", "", _MARK, "", f"# {title}", ""]
        lines += [self._about(data), ""]
        lines += ["## Training", "", *_table("option", self._options()), ""]
        if self.metrics:
            numbers = {key: f"{value:.4g}" for key, value in self.metrics.items()}
            lines += ["## On held-out rows", "", *_table("", numbers), ""]
        return "\n".join([*lines, "## Versions", "", *_table("package", self.versions), ""])

    def _metadata(self, said: Mapping[str, Any]) -> dict[str, Any]:
        own: dict[str, Any] = {
            "library_name": "peft" if self.adapter else "transformers",
            "pipeline_tag": _TASKS.get(self.args.objective, "text-generation"),
            "base_model": split(self.base)[0] if self.base and is_hub_name(self.base) else None,
            "datasets": _hub_datasets(self.args.dataset),
            "tags": ["shardwright", self.args.objective, *(["lora"] if self.adapter else [])],
        }
        for key, value in said.items():
            if key in _METADATA:
                field = _METADATA[key]
                values = [value] if isinstance(value, str) else list(value)
                own[field] = values if field in _LISTS else values[0]
        own["tags"] = list(dict.fromkeys(["shardwright", *own["tags"]]))
        return {key: value for key, value in own.items() if value}

    def _about(self, data: Mapping[str, Any]) -> str:
        kind = "A LoRA adapter" if self.adapter else "A model"
        base = _shown(self.base) if self.base else "random weights"
        if data.get("base_model"):
            base = f"[{base}](https://huggingface.co/{data['base_model']})"
        sets = ", ".join(data.get("datasets", ())) or _shown(self.args.dataset or "the source of Python's library")
        way = f"{self.args.entry.title}, recipe {self.recipe}, mesh {mesh_text(self.mesh)}"
        return f"{kind} trained from {base} on {sets}: {way}."

    def _options(self) -> dict[str, str]:
        """The options that are not as by default, but for those of where the run is written and how it is watched."""
        left_out = _SAID_ELSEWHERE | {each.name for each in fields(OutputArguments)}
        known = {each.name: each.default for each in fields(TrainingArguments) if each.name not in left_out}
        values = {name: value for name, value in self.args.as_dict().items() if name in known}
        return {name: _shown(value) for name, value in values.items() if value != known[name]}


def last_metrics(history: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The last evaluation's metrics of every held-out set; each set has a log entry of its own."""
    told = [(entry["step"], key, value) for entry in history for key, value in entry.items() if key.startswith("eval_")]
    return {key: value for step, key, value in told if step == told[-1][0]}


def may_write(text: bytes | None) -> bool:
    """Whether a folder's README.md, None: it has none, may be replaced: one of somebody's own stays."""
    return text is None or _MARK.encode() in text


def _hub_datasets(dataset: str | None) -> list[str]:
    names = [re.split("[:@#]", each.strip())[0] for each in (dataset or "").split(",")]
    return [name for name in names if name.count("/") == 1 and is_hub_name(name)]


def _shown(value: Any) -> str:
    """``value`` for a page: of a path on this machine its last part alone."""
    text = str(value)
    return os.path.basename(text.rstrip(os.sep)) if os.path.isabs(text) or os.path.exists(text) else text


def _table(name: str, rows: Mapping[str, str]) -> list[str]:
    if not rows:
        return ["All options are as by default."]
    texts = {key: value.replace("\n", " ").replace("|", r"\|") for key, value in rows.items()}
    return [f"| {name} | |", "|---|---|", *(f"| {key} | {text} |" for key, text in texts.items())]
