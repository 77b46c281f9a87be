"""Configs with their real sizes, which the small models of other tests have not: each is read, and planned.

``real_configs.jsonl.gz`` has the config.json of 136 published repositories, as public copies had them in November 2026
(``source`` names the copy), without labels and lists of quantised modules.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
)

from shardwright.errors import UserError
from shardwright.layout.auto import UNMADE, auto_recipe
from shardwright.layout.plan import make_plan
from shardwright.model.attention_probe import our_attention
from shardwright.model.facts import ModelFacts
from shardwright.model.meta_model import config_of, load_config
from shardwright.models.attention.attention_interface import MASKED, NAME
from shardwright.models.tiny import shrunk
from shardwright.scripts.measure.families import distinct

REAL = [
    json.loads(line)
    for line in gzip.decompress(Path(__file__).with_name("real_configs.jsonl.gz").read_bytes()).splitlines()
]
# transformers knows these only by code of their repositories
UNKNOWN = {"kimi_k2", "kimi_k3", "mimo", "molmo", "nemotron-nas"}
# transformers' own classes refuse their defaults
NO_DEFAULT = {"gemma4_assistant", "nougat"}
NOT_PLANNED = (
    r"it is built as an encoder|is an encoder and a decoder|names no text decoder and head|without a causal-LM head"
    r"|transformers cannot build a model from this config|requires the timm library"
)
OF_EACH_TYPE = {row["config"]["model_type"]: row for row in REAL if row["config"]["model_type"] not in UNKNOWN}.values()
DEVICES = 8

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning")  # in one published config


def read(values: dict[str, Any], folder: Path) -> Any:
    file = folder / "config.json"
    file.write_text(json.dumps(values, default=str))
    return load_config(str(file), UNMADE)


def said_size(name: str) -> float | None:
    """The parameters in a repository's name, such as 30e9 in Qwen3-30B-A3B; None for 8x7B and 17B-16E."""
    found = re.search(r"-(\d+(?:\.\d+)?)([bt])(?=-|$)(?!-\d+e)", name.lower())
    return float(found[1]) * {"b": 1e9, "t": 1e12}[found[2]] if found else None


def test_transformers_own_default_of_every_model_type_is_read(tmp_path: Path) -> None:
    kinds = [kind for kind in CONFIG_MAPPING if kind not in NO_DEFAULT]
    assert len(kinds) > 800
    for kind in kinds:
        default = AutoConfig.for_model(kind)
        assert type(read(default.to_dict() | {"model_type": kind}, tmp_path)) is type(default)


@pytest.mark.slow
def test_transformers_own_default_of_every_type_with_a_text_head_is_planned_or_refused_in_words() -> None:
    heads = {*MODEL_FOR_CAUSAL_LM_MAPPING, *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING}
    kinds = [kind for kind, config in CONFIG_MAPPING.items() if config in heads and kind not in NO_DEFAULT]
    refused = {}
    for kind in kinds:
        try:
            facts = ModelFacts(config_of(AutoConfig.for_model(kind).to_dict() | {"model_type": kind}))
            make_plan(auto_recipe(facts.model, facts.experts, devices=DEVICES).recipe, facts.model, DEVICES)
        except UserError as error:
            refused[kind] = str(error)
    assert not {kind: words for kind, words in refused.items() if not re.search(NOT_PLANNED, words)}
    assert len(refused) <= 60 < len(kinds) / 4


def test_every_published_config_is_read_or_its_type_is_unknown_to_transformers(tmp_path: Path) -> None:
    assert len(REAL) == 136
    refused = {}
    for row in REAL:
        try:
            read(row["config"], tmp_path)
        except UserError as error:
            refused[row["config"]["model_type"]] = error.found
    assert refused.keys() == UNKNOWN
    for kind, found in refused.items():
        assert re.search(rf"model_type '{kind}' is unknown to transformers [\d.]+, and code of a model's own", found)


@pytest.mark.parametrize("row", OF_EACH_TYPE, ids=lambda row: row["name"])
def test_a_published_model_is_planned_and_as_large_as_its_name_says(row: dict[str, Any], tmp_path: Path) -> None:
    facts = ModelFacts(read(row["config"], tmp_path))
    plan = make_plan(auto_recipe(facts.model, facts.experts, devices=DEVICES).recipe, facts.model, DEVICES)
    held = plan.totals["parameters_bytes"] * DEVICES / 4  # float32, and what is replicated is held eight times
    assert facts.parameters <= held <= 1.1 * facts.parameters
    flops = facts.training_flops(1, 1)  # of a token; None: the config does not say how many experts it goes to
    assert flops is None or 0 < flops <= 6.5 * facts.parameters
    if (said := said_size(row["name"])) is not None:
        assert facts.parameters == pytest.approx(said, rel=0.35)


def test_the_forward_of_every_published_model_runs_without_values() -> None:
    """Shrunk, with all that is special to it; `python scripts/measure/families.py --configs` trains each for a step."""
    refused = {}
    for name, values in distinct(Path(__file__).with_name("real_configs.jsonl.gz")).items():
        if values["model_type"] not in UNKNOWN:
            try:
                assert our_attention(ModelFacts(shrunk(config_of(values).get_text_config())), 128) in (NAME, MASKED)
            except UserError as error:
                refused[name] = error.found
    # whose text has no class of its own
    assert {name for name, found in refused.items() if "without a causal-LM head" not in found} == set()


def test_a_size_given_as_a_number_of_numpy_or_torch_builds_as_in_transformers() -> None:
    assert ModelFacts(config_of({"model_type": "inkling_mm_model"})).parameters > 1e9


def test_the_text_part_of_an_encoder_and_decoder_is_refused() -> None:
    with pytest.raises(UserError, match="T5Gemma2ForConditionalGeneration is an encoder and a decoder"):
        ModelFacts(config_of({"model_type": "t5gemma2"}))
    with pytest.raises(UserError, match="BartForConditionalGeneration is an encoder and a decoder"):
        ModelFacts(config_of({"model_type": "bart", "architectures": ["BartForConditionalGeneration"]}))


def test_a_tower_of_a_package_that_is_not_there_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # which is installed on some machines
    with pytest.raises(UserError, match=r"timm(.|\n)*instead: the package that it names, in this environment"):
        ModelFacts(config_of({"model_type": "gemma3n"}))
