"""The table of published repositories: what comes of a small model of each, in its repository's own format.

python -m tests.support.repository_table [PART_OF_A_NAME …] > table.md

For each of the 136 whole configs in tests/model/real_configs.jsonl.gz a tiny model of its type is saved as its
quantization_config says, with random codes, and read by the code that a run reads with. Columns: **loads**, the largest
difference of any weight from the values that the codes stand for, written down a second time in
`tests/support/quantized.py`; **full**, the number of weights that recipe auto lays out over 8 devices; **LoRA**, the
number of weights that get factors; **export**, the difference after an export and a reading of it; **same**, whether
`--format same` writes each tensor of the files bit for bit, or why it is refused.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.layout.auto import AUTO, UNMADE, auto_recipe
from shardwright.layout.plan import make_plan
from shardwright.model.facts import ModelFacts
from shardwright.model.lora_options import lora_of
from shardwright.model.meta_model import load_config, meta_model
from shardwright.weights.hub_read import HubWeights, open_hub_weights
from shardwright.weights.hub_write import ExportFormat, export
from tests.model.test_real_configs import REAL
from tests.support.hub_models import tensors_in
from tests.weights.formats.test_repositories import ROWS, opened

COLUMNS = ("repository", "format", "loads", "full", "LoRA", "export", "same")
SETTINGS = {row["name"]: row["quantization_config"] for row in ROWS}


def difference(ours: HubWeights, theirs: HubWeights) -> float:
    """The largest difference of a weight in bfloat16."""
    found = 0.0
    for name in theirs.group_of:
        one, other = (whole(each(name)).to(torch.bfloat16).double() for each in (ours, theirs))
        found = max(found, float((one - other).abs().max().nan_to_num(torch.inf)))
    return found


def same_files(base: Path, out: Path) -> str:
    one, other = tensors_in(base), tensors_in(out)
    odd = [name for name in one.keys() | other.keys() if not _equal(one.get(name), other.get(name))]
    return "bit for bit" if not odd else f"{len(odd)} of {len(one)} tensors differ, {sorted(odd)[0]}"


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def row_of(name: str, kind: str, folder: Path) -> tuple[str, ...]:
    """The table's columns for a small model of ``kind``; raises UserError where a run would."""
    config, weights, referee = opened(folder, kind, SETTINGS.get(name))
    facts = ModelFacts(config)
    plan = make_plan(auto_recipe(facts.model, facts.experts, devices=8).recipe, facts.model, 8)
    lora = lora_of(TrainingArguments(recipe=AUTO, num_train_epochs=1, lora_r=4), facts)
    export(folder / "out", meta_model(config), weights, base=weights)
    again = open_hub_weights(str(folder / "out"), meta_model(load_config(str(folder / "out"), UNMADE)))
    try:
        export(folder / "same", meta_model(config), weights, form=ExportFormat(format="same"), base=weights)
        same = same_files(folder, folder / "same")
    except UserError as error:
        same = f"refused: {error.found[:80]}"
    said = weights.said.removesuffix(", dequantized to bfloat16") or "bfloat16"
    count = len(lora.targets) if lora is not None else 0
    loads, exported = (f"{difference(each, referee):.3g}" for each in (weights, again))
    return said, loads, str(len(plan.parameters)), str(count), exported, same


def main(wanted: list[str]) -> None:
    warnings.simplefilter("ignore")
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}")
    known: dict[str, tuple[str, ...]] = {}
    for row in REAL:
        name, kind = row["name"], row["config"]["model_type"]
        if wanted and not any(word in name for word in wanted):
            continue
        key = json.dumps([kind, {k: v for k, v in SETTINGS.get(name, {}).items() if "ignore" not in k}], sort_keys=True)
        if key not in known:
            with tempfile.TemporaryDirectory() as scratch, contextlib.redirect_stderr(io.StringIO()):
                known[key] = _columns(name, kind, Path(scratch))
        print(f"| {name} | {' | '.join(known[key])} |", flush=True)


def _columns(name: str, kind: str, folder: Path) -> tuple[str, ...]:
    try:
        return row_of(name, kind, folder)
    except UserError as error:
        return ("", f"refused: {error.found[:160]}", *[""] * 4)
    except ValueError as error:
        if kind not in CONFIG_MAPPING:
            return ("", f"refused: transformers has no model type {kind}", *[""] * 4)
        if "AutoModelForCausalLM" not in str(error):
            raise
        return ("", "not made small: its text model is a part of the whole alone", *[""] * 4)
    except Exception as error:
        return ("", f"{type(error).__name__}: {str(error)[:160]}", *[""] * 4)


if __name__ == "__main__":
    main(sys.argv[1:])
