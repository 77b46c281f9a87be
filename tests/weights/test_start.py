"""Which weights a run starts from: those of a folder or hub id, or random ones where they are asked for, and said."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright import Trainer, TrainingArguments, UserError
from shardwright.inputs import RunInputs
from shardwright.model.meta_model import meta_model
from shardwright.run import Start, prepare
from shardwright.weights.hub_read import HubWeights
from shardwright.weights.hub_write import export
from shardwright.weights.weight_sources import seeded_init
from tests.data.test_tekken import write_tekken
from tests.support.chats import byte_tokenizer

CONFIG = LlamaConfig(
    vocab_size=304,
    hidden_size=16,
    intermediate_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
)
# files beside config.json → what is said of them
WITHOUT: dict[str, tuple[dict[str, str], str]] = {
    "a config and a tokenizer": ({}, r"but config.json, tokenizer.json"),
    "pth": ({"consolidated.00.pth": ""}, r"consolidated.00.pth \(0 bytes\)"),
    "pt": ({"model.pt": ""}, r"model.pt \(0 bytes\)"),
    "bin": ({"pytorch_model.bin": ""}, r"pytorch_model.bin \(0 bytes\)"),
    "gguf": ({"llama-Q4_K_M.gguf": "GGUF"}, "llama-Q4_K_M.gguf"),
    "TensorFlow's": ({"tf_model.h5": ""}, "tf_model.h5"),
    "half a file": ({"model.safetensors.incomplete": "\0"}, "model.safetensors.incomplete"),
    "a shard without its index": ({"model-00001-of-00002.safetensors": ""}, "model-00001-of-00002.safetensors"),
    "an index without its shards": (
        {
            "model.safetensors.index.json": json.dumps(
                {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
            )
        },
        "that are not there",
    ),
    "an empty file": ({"model.safetensors": ""}, "truncated or corrupt"),
    "an adapter": ({"adapter_model.safetensors": "", "adapter_config.json": "{}"}, "adapter_model.safetensors"),
    "a subfolder": ({"original/model.safetensors": ""}, "original"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    CONFIG.save_pretrained(tmp_path / "given")
    return tmp_path / "given"


def started(tmp_path: Path, **options: Any) -> Start:
    """A run that is ready to read its data."""
    options = {"recipe": "llama_fsdp", "output_dir": str(tmp_path / "out"), "sequence_length": 32} | options
    return prepare(TrainingArguments(**options), RunInputs(), [], Console(quiet=True), writes=False)


@pytest.mark.parametrize("case", WITHOUT)
def test_a_folder_without_weights_is_refused_unless_random_ones_are_asked_for(folder, tmp_path, case):
    files, said = WITHOUT[case]
    byte_tokenizer().save_pretrained(folder)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(content)
    with pytest.raises(UserError, match=said):
        started(tmp_path, model=str(folder))
    start = started(tmp_path, model=str(folder), from_scratch=True)
    assert start.source is None
    assert start.weights_said(None) == "random, of seed 42 (--from_scratch)"
    assert start.tokenizer is not None


def test_a_configs_own_path_and_a_recipes_own_model_ask_for_random_weights(folder, tmp_path):
    for model, why in ((None, "the recipe's own model"), (str(folder / "config.json"), f"{folder}/config.json")):
        start = started(tmp_path, model=model)
        assert start.source is None
        assert start.weights_said(None) == f"random, of seed 42 ({why})"


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
def test_weights_that_are_there_are_taken_and_named_and_so_is_an_adapter(folder, tmp_path):
    model = meta_model(CONFIG)
    export(str(folder.parent / "whole"), model, seeded_init(model, 0))
    whole = str(folder.parent / "whole")
    byte_tokenizer().save_pretrained(whole)
    start = started(tmp_path, model=whole)
    assert isinstance(start.source, HubWeights)
    assert start.weights_said(None) == f"those of {whole}"
    assert started(tmp_path, model=whole, from_scratch=True).source is None
    get_peft_model(LlamaForCausalLM(CONFIG), LoraConfig(target_modules=["q_proj"])).save_pretrained(tmp_path / "lora")
    adapted = started(tmp_path, model=whole, adapter=str(tmp_path / "lora"))
    assert adapted.weights_said(None) == f"those of {whole}; the adapter's, of {tmp_path}/lora"
    values = json.loads((tmp_path / "lora/adapter_config.json").read_text())
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(values | {"base_model_name_or_path": "a/other"}))
    adapted = started(tmp_path, model=whole, adapter=str(tmp_path / "lora"))
    assert adapted.weights_said(None).endswith("/lora, which was trained beside a/other")


def test_weights_are_trained_with_a_tokenizer_of_theirs_or_none(folder, tmp_path):
    model, whole = meta_model(CONFIG), tmp_path / "whole"
    export(str(whole), model, seeded_init(model, 0))
    with pytest.raises(UserError, match="no file of a tokenizer in a folder that holds config") as refused:
        started(tmp_path, model=str(whole))
    assert "--tokenizer" in refused.value.instead
    byte_tokenizer().save_pretrained(tmp_path / "elsewhere")
    assert started(tmp_path, model=str(whole), tokenizer=str(tmp_path / "elsewhere")).tokenizer is not None
    assert started(tmp_path, model=str(whole), from_scratch=True).tokenizer is None  # one of the data's is trained
    write_tekken(tmp_path)  # the name has no "tokenizer" in it
    shutil.move(tmp_path / "tekken.json", whole)
    assert "th" in started(tmp_path, model=str(whole)).tokenizer.get_vocab()


def test_a_given_models_own_weights_can_not_be_left_out():
    with pytest.raises(UserError, match="from_scratch"):
        Trainer(LlamaForCausalLM(CONFIG), TrainingArguments(from_scratch=True), processing_class=byte_tokenizer())
