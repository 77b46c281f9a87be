"""The files beside an export's weights, and the dtypes of its tensors: a loader makes of them what was trained."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shardwright.layout.auto import UNMADE
from shardwright.model.meta_model import load_config, meta_model
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.routing import selection_biases
from shardwright.models.tiny import families, tiny_config
from shardwright.weights.hub_write import ExportFormat, export
from shardwright.weights.tokenizer_files import tokenizer_files
from tests.support.chats import CHATML, byte_tokenizer
from tests.support.hub_models import tensors_in
from tests.support.lives import TINY
from tests.support.tokenizers import SHAPES

LISTS = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")


def kept_by(family: str) -> list[str]:
    """The names of what the family's class keeps in float32 when it is loaded in a narrower dtype."""
    kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(tiny_config(family))]
    return [name for names in LISTS for name in getattr(kind, names, None) or ()]


KEPT = [family for family in families() if kept_by(family)]


def thirds(model):
    """A source of values that bfloat16 can't hold."""
    state = model.state_dict()
    return lambda name: torch.full(state[name].shape, 1 / 3).to(state[name].dtype)


def described(folder: Path, tokenizer=None) -> dict:
    """Exports the model of the config in ``folder`` beside it; returns the written config."""
    config = load_config(str(folder), UNMADE)
    export(folder.parent / "out", model := meta_model(config), thirds(model), tokenizer)
    return json.loads((folder.parent / "out/config.json").read_text())


@pytest.fixture
def base(tmp_path) -> Path:
    LlamaConfig(**TINY, eos_token_id=2).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.mark.parametrize("family", KEPT)
def test_a_bfloat16_export_keeps_in_float32_what_transformers_keeps_and_says_bfloat16(tmp_path, family):
    model = meta_model(tiny_config(family))
    export(tmp_path, model, thirds(model), form=ExportFormat(format="bf16"))
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    dtypes = {values.dtype for values in tensors_in(tmp_path).values() if values.is_floating_point()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    wide = {name: values for name, values in loaded.state_dict().items() if values.dtype == torch.float32}
    assert all(torch.equal(values, torch.full_like(values, 1 / 3)) for values in wide.values())
    strict = getattr(type(loaded), LISTS[1], None) or ()  # the other list is kept beside float16 alone
    present = [name for name, _ in loaded.named_parameters() if any(part in name for part in strict)]
    chosen_by = selection_biases(model, experts_modules(model))  # which engines read so
    assert dtypes == ({torch.bfloat16, torch.float32} if wide or present or chosen_by else {torch.bfloat16})


def test_biases_in_float32_beside_weights_in_bfloat16_leave_the_config_s_dtype_bfloat16(tmp_path):
    """As DeepSeek-V3's files are: a loader would take all of a 671 B model in float32."""
    model = meta_model(tiny_config("deepseek_v3"))
    source, kept = thirds(model), kept_by("deepseek_v3")
    export(tmp_path, model, lambda name: source(name) if any(k in name for k in kept) else source(name).bfloat16())
    assert {values.dtype for values in tensors_in(tmp_path).values()} == {torch.bfloat16, torch.float32}
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"


def test_many_families_keep_something_in_float32():
    assert len(KEPT) >= 15


def test_the_end_of_a_text_in_the_config_is_the_tokenizer_s_and_a_generation_s_other_ends_stay(base):
    GenerationConfig(eos_token_id=[2, 7], temperature=0.5, do_sample=True).save_pretrained(base)
    tokenizer = byte_tokenizer(CHATML, "<|im_end|>")
    assert described(base, tokenizer)["eos_token_id"] == tokenizer.eos_token_id
    found = GenerationConfig.from_pretrained(base.parent / "out")
    assert (found.eos_token_id, found.temperature) == ([tokenizer.eos_token_id, 2, 7], 0.5)


def test_a_tokenizer_that_was_changed_is_written_as_it_is(base):
    SHAPES["legacy_map"](base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    given = tokenizer_files(tokenizer)
    assert given["special_tokens_map.json"] == (base / "special_tokens_map.json").read_bytes()
    tokenizer.chat_template = "{{ messages }}"
    described(base, tokenizer)
    assert AutoTokenizer.from_pretrained(base.parent / "out").chat_template == "{{ messages }}"
    assert tokenizer_files(tokenizer) != given


def test_a_tokenizer_of_another_family_than_the_model_opens_the_same_beside_the_model_s_config(base, tmp_path):
    """The model type in `config.json` decides on a tokenizer's class, and here it is not that of the origin."""
    (tmp_path / "origin").mkdir()
    SHAPES["added_tokens"](tmp_path / "origin")
    (tmp_path / "origin/config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "origin")
    described(base, tokenizer)
    assert (
        AutoTokenizer.from_pretrained(tmp_path / "out")("a <|im_end|>\n").input_ids
        == tokenizer("a <|im_end|>\n").input_ids
    )


@pytest.mark.parametrize("names", [("model_own.py", "parts_own.py"), ("model_own.py",), ("parts_own.py",), ()])
def test_code_that_a_config_names_comes_along_whole_or_is_not_named(base, names):
    values = json.loads((base / "config.json").read_text())
    values["auto_map"] = {"AutoConfig": "model_own.Config", "AutoModelForCausalLM": "model_own.Model"}
    (base / "config.json").write_text(json.dumps(values))
    code = {"model_own.py": "from .parts_own import PART\n", "parts_own.py": "PART = 1\n"}
    for name in names:
        (base / name).write_text(code[name])
    found, whole = described(base), len(names) == 2
    assert found.get("auto_map") == (values["auto_map"] if whole else None)
    assert {path.name for path in (base.parent / "out").glob("*.py")} == (set(code) if whole else set())


@pytest.mark.parametrize("reference", ["someone/else--model_own.Config", "../secret.Config", "/etc/secret.Config"])
def test_code_is_brought_from_the_model_s_own_folder_alone(base, reference):
    (base.parent / "secret.py").write_text("KEY = 1\n")
    values = json.loads((base / "config.json").read_text()) | {"auto_map": {"AutoConfig": reference}}
    (base / "config.json").write_text(json.dumps(values))
    assert ("auto_map" in described(base)) == ("--" in reference)
    assert not list((base.parent / "out").rglob("*.py"))
