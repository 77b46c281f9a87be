"""Weights in from a seed or a checkpoint, and out in the hub's format that transformers itself loads."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.parity import make_batch, make_case, small_config
from trainer import weights
from trainer.errors import UserError
from trainer.model import meta_model
from trainer.recipe import load_recipe


@pytest.fixture
def config():
    return small_config(load_recipe("mixtral_ep"))


@pytest.mark.parametrize("scan", [True, False])
@pytest.mark.parametrize("recipe", ["mixtral_ep", "llama_tp"])
def test_the_exported_folder_holds_every_tensor_of_the_model_exactly_under_hub_names(tmp_path, recipe, scan):
    case = make_case(recipe, scan=scan)
    weights.export(tmp_path, meta_model(case.config), case.plan, case.step.parameters, None)
    case.reference.save_pretrained(tmp_path / "theirs")
    ours, theirs = (_tensors(folder) for folder in (tmp_path, tmp_path / "theirs"))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    if recipe == "mixtral_ep":
        assert any("block_sparse_moe.experts.0.w1" in name for name in ours)


def test_the_exported_model_loads_on_plain_cpu_and_has_the_same_held_out_loss(tmp_path):
    case = make_case("mixtral_ep")
    for step in (1, 2, 3):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-3)
    batch = make_batch(case.config, seed=9)
    ours = case.evaluation([batch])
    weights.export(tmp_path, meta_model(case.config), case.plan, case.step.parameters, None)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(**batch).loss.item() == pytest.approx(ours, rel=1e-4)


def test_tied_embeddings_are_written_once_and_load_tied(tmp_path):
    case = make_case("llama_fsdp", small_config(load_recipe("llama_fsdp"), tie_word_embeddings=True))
    weights.export(tmp_path, meta_model(case.config), case.plan, case.step.parameters, None)
    assert "lm_head.weight" not in _tensors(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert torch.equal(loaded.lm_head.weight, case.reference.lm_head.weight)


def test_a_checkpoint_folder_is_the_start_of_training(tmp_path):
    case = make_case("mixtral_ep")
    case.reference.save_pretrained(tmp_path)
    source = weights.checkpoint_weights(str(tmp_path), case.config)
    for name, parameter in case.reference.named_parameters():
        assert torch.equal(source(name), parameter), name


def test_seeded_init_has_the_models_own_scale_and_depends_on_nothing_but_the_seed(config):
    one, two, other = (weights.seeded_init(meta_model(config), seed) for seed in (1, 1, 2))
    names = [name for name, _ in meta_model(config).named_parameters()]
    values = {name: one(name) for name in reversed(names)}
    assert all(torch.equal(values[name], two(name)) for name in names)
    embedding = values["model.embed_tokens.weight"]
    assert embedding.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert torch.equal(values["model.norm.weight"], torch.ones(64))
    assert not torch.equal(embedding, other("model.embed_tokens.weight"))
    layers = [values[f"model.layers.{i}.mlp.experts.down_proj"] for i in range(2)]
    assert not torch.equal(*layers)


def test_weights_of_another_shape_are_refused_by_name(tmp_path, config):
    make_case("mixtral_ep").reference.save_pretrained(tmp_path)
    other = small_config(load_recipe("mixtral_ep"), vocab_size=512)
    with pytest.raises(UserError, match="embed_tokens"):
        weights.checkpoint_weights(str(tmp_path), other)


def test_a_truncated_weight_file_is_refused(tmp_path, config):
    make_case("mixtral_ep").reference.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(UserError, match="could not be loaded"):
        weights.checkpoint_weights(str(tmp_path), config)


def _tensors(folder):
    tensors = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    index = folder / "model.safetensors.index.json"
    if index.exists():
        assert json.loads(index.read_text())["weight_map"].keys() == tensors.keys()
    return tensors
