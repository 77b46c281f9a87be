"""Names of weights behind the prefixes that wrappers of a model leave."""

from __future__ import annotations

import io

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.model.meta_model import meta_model, whole_model
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.wrapper_prefixes import without_prefixes
from tests.support.hub_models import config_of, save_theirs
from tests.support.multimodal import FAMILIES, TEXT
from tests.support.multimodal import config_of as multimodal

STACKS = {
    "module.": "module.",
    "_orig_mod.": "_orig_mod.",
    "base_model.model.": "base_model.model.",
    "module._orig_mod.": "_orig_mod.' and 'module.",
    "_forward_module._fsdp_wrapped_module.": "_fsdp_wrapped_module.' and '_forward_module.",
    "_orig_mod.module.base_model.model.": "_orig_mod.' and 'module.' and 'base_model.model.",
}


def saved_as(folder, rename):
    file = folder / "model.safetensors"
    save_file({rename(name): tensor for name, tensor in load_file(file).items()}, file)


def opened(folder, family="mixtral"):
    out = io.StringIO()
    return open_hub_weights(str(folder), meta_model(config_of(family)), Console(file=out, width=200)), out.getvalue()


def check(weights, theirs):
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(whole(weights(name)), tensor), name


@pytest.mark.parametrize("stack", STACKS)
def test_a_wrapper_s_prefixes_are_taken_off_and_said(tmp_path, stack):
    theirs = save_theirs(tmp_path, config_of("mixtral"))
    saved_as(tmp_path, lambda name: stack + name)
    weights, said = opened(tmp_path)
    check(weights, theirs)
    assert said == f"weights: names without '{STACKS[stack]}'\n"


def test_the_names_are_those_that_torch_s_own_wrappers_give(tmp_path):
    theirs = save_theirs(tmp_path, config_of("llama"))
    theirs.model.layers[1] = torch.compile(theirs.model.layers[1])  # one layer alone
    wrapped = nn.Module()
    wrapped.module = torch.compile(theirs)  # as DistributedDataParallel holds it
    save_file(wrapped.state_dict(), tmp_path / "model.safetensors")
    assert "module._orig_mod.model.layers.1._orig_mod.mlp.up_proj.weight" in load_file(tmp_path / "model.safetensors")
    weights, said = opened(tmp_path, "llama")
    assert said == "weights: names without '_orig_mod.' and 'module.'\n"
    theirs.model.layers[1] = theirs.model.layers[1]._orig_mod
    check(weights, theirs)


def test_the_text_part_of_a_multimodal_checkpoint_is_read_onto_the_model_of_text_alone(tmp_path):
    theirs = save_theirs(tmp_path, config_of("llama"))
    saved_as(tmp_path, lambda name: name.replace("model.", "model.language_model.", 1))
    weights, said = opened(tmp_path, "llama")
    assert said == "weights: names without 'model.language_model.'\n"
    check(weights, theirs)


def test_names_that_are_the_model_s_own_stay():
    for family in FAMILIES:
        model = whole_model(multimodal(family))
        names = {name: name for name in model.state_dict()}
        assert without_prefixes(names, model) == (names, [])
    nested = whole_model(multimodal("gemma3"))
    assert any(name.startswith("model.language_model.") for name in nested.state_dict())
    found, gone = without_prefixes({f"module.{name}": name for name in nested.state_dict()}, nested)
    assert (found, gone) == ({name: name for name in nested.state_dict()}, ["module."])


def test_names_that_transformers_maps_itself_stay():
    config = AutoConfig.for_model("qwen3_5_text", **TEXT)
    model = meta_model(config)
    names = [name.replace("model.", "model.language_model.", 1) for name in model.state_dict()]
    assert without_prefixes(dict.fromkeys(names), model) == (dict.fromkeys(names), [])


def test_names_that_fit_neither_way_are_refused_as_they_stand(tmp_path):
    save_theirs(tmp_path, config_of("llama"))
    saved_as(tmp_path, lambda name: f"module.encoder.{name}")
    with pytest.raises(UserError, match=r"left over: module\.encoder\."):
        opened(tmp_path, "llama")


def test_two_tensors_that_would_have_one_name_are_refused(tmp_path):
    save_theirs(tmp_path, config_of("llama"))
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "module.model.norm.weight": tensors["model.norm.weight"] + 1}, file)
    with pytest.raises(UserError, match=r"model\.norm\.weight are both model\.norm\.weight without 'module\.'"):
        opened(tmp_path, "llama")
