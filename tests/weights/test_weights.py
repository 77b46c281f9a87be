"""Weights onto the devices, a layer at a time, from any source; and back from there."""

from __future__ import annotations

import copy
import weakref

import pytest
import torch
from transformers import AutoModelForCausalLM

from shardwright.layout.auto import auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.stacking import is_stacked
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import tiny_config
from shardwright.weights.hub_write import export
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla.device_mesh import build_mesh
from tests.support.cases import make_batch, make_case, small_config
from tests.support.jobs import job_of


@pytest.fixture
def config():
    return small_config(load_recipe("mixtral_ep"))


def whole(values):
    return values[tuple(slice(0, size) for size in values.shape)]


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "layer by layer"])
@pytest.mark.parametrize("recipe", ["mixtral_ep", "mixtral_ep_tp", "llama_tp"])
def test_what_is_placed_comes_back_from_the_devices_under_the_models_own_names(recipe, scan):
    case = make_case(recipe, scan=scan)
    live = LiveWeights(case.step.loss.model, case.plan, case.mesh, case.step.parameters)
    for name, parameter in case.reference.named_parameters():
        assert (live(name).shape, live(name).dtype) == (tuple(parameter.shape), parameter.dtype)
        assert torch.equal(whole(live(name)), parameter), name


def test_stacks_of_different_depth_are_each_placed_and_read_back_whole():
    """Three pairs of layers and then two alike: the shallower stacks hold parameters as large as the deeper ones."""
    kinds = [*["sliding_attention", "full_attention"] * 3, "sliding_attention", "sliding_attention"]
    config = tiny_config("gemma2", num_hidden_layers=len(kinds), layer_types=kinds)
    model = meta_model(config)
    job = job_of(auto_recipe(model, []).recipe, config)
    assert {parameter.shape[0] for parameter in job.stored.parameters if is_stacked(parameter.name)} == {2, 3}
    mesh, weights = build_mesh(job.recipe.mesh), seeded_init(model, 0)
    placed = copy.deepcopy(job.assembled)
    parameters = place_parameters(placed, job.stored, mesh, weights)
    live = LiveWeights(placed, job.stored, mesh, parameters)
    for name, _ in model.named_parameters():
        assert torch.equal(whole(live(name)), weights(name)), name


def test_other_weights_take_the_place_of_those_before_and_never_lie_beside_them():
    case = make_case("mixtral_ep")
    model, parameters, weights = case.step.loss.model, case.step.parameters, case.reference.state_dict()
    before = [weakref.ref(parameter) for parameter in parameters.values()]
    parameters.clear()
    left: list[int] = []

    def source(name):
        left.append(sum(reference() is not None for reference in before))
        return weights[name]

    parameters.update(place_parameters(model, case.plan, case.mesh, source))
    assert set(left) == {0}, "the chip would hold all weights twice"


def test_the_exported_model_loads_on_plain_cpu_and_has_the_same_held_out_loss(tmp_path):
    case = make_case("mixtral_ep")
    for step in (1, 2, 3):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-3)
    batch = make_batch(case.config, seed=9)
    ours = case.evaluation([batch]).loss
    live = LiveWeights(case.step.loss.model, case.plan, case.mesh, case.step.parameters)
    export(tmp_path, meta_model(case.config), live)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded(**batch).loss.item() == pytest.approx(ours, rel=1e-4)


def test_seeded_init_has_the_models_own_scale_and_depends_on_nothing_but_the_seed(config):
    one, two, other = (seeded_init(meta_model(config), seed) for seed in (1, 1, 2))
    names = [name for name, _ in meta_model(config).named_parameters()]
    values = {name: one(name) for name in reversed(names)}
    assert all(torch.equal(values[name], two(name)) for name in names)
    embedding = values["model.embed_tokens.weight"]
    assert embedding.std().item() == pytest.approx(config.initializer_range, rel=0.1)
    assert torch.equal(values["model.norm.weight"], torch.ones(64))
    assert not torch.equal(embedding, other("model.embed_tokens.weight"))
    layers = [values[f"model.layers.{i}.mlp.experts.down_proj"] for i in range(2)]
    assert not torch.equal(*layers)
