"""The mutation table: faults of a recipe or a kernel, planted one by one into our side of a proof, are each caught.

The plain side is computed once for each model. A fault is a context in which our side is made and run.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.layout.load_recipe import load_recipe
from shardwright.models.ops import partial_gradients
from shardwright.models.ops.jax_call import jax
from shardwright.prove.batches import Batch, make_batches
from shardwright.prove.plain import PlainModel, plain_model
from shardwright.prove.sharded import run_placed
from shardwright.prove.small_job import RATE
from shardwright.prove.trajectory import Difference, Trajectory, differences
from shardwright.step.build import place_model
from shardwright.step.placed_model import PlacedModel
from shardwright.weights.weight_sources import Source
from shardwright.xla.device_mesh import build_mesh
from tests.support.jobs import job_of

STEPS = 2
SIZES = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 256, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "sliding_window": 8}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("llama_fsdp", {"model_type": "mistral", "num_hidden_layers": 2}),
    "experts": (
        "mixtral_ep",
        {"model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 4, "router_aux_loss_coef": 0.02},
    ),
}
OPTIONS: dict[str, Any] = {"sequence_length": 16, "weight_decay": 0.1, "max_steps": STEPS, "warmup_steps": 0}
OPTIONS |= {"max_grad_norm": 0.5, "per_device_train_batch_size": 2}


@dataclass
class Ours:
    """Our side before it runs; a fault changes some of it."""

    plain: PlainModel
    job: Any
    source: Source
    batches: list[Batch]
    after: Callable[[PlacedModel], None] = lambda placed: None  # what happens to the model on its mesh

    def run(self) -> Trajectory:
        placed = place_model(self.job, build_mesh(self.job.recipe.mesh), self.source)
        self.after(placed)
        return run_placed(placed, self.batches, RATE)


def job(name: str, options: dict[str, Any] | None = None, compute: dict[str, Any] | None = None, **config: Any) -> Any:
    recipe, values = MODELS[name]
    found = load_recipe(recipe)
    plain = {"dtype": "float32", "scan": False, "remat": "none", **(compute or {})}
    found = found.computing(**plain)
    return job_of(found, AutoConfig.for_model(**{**SIZES, **values, **config}), **{**OPTIONS, **(options or {})})


@functools.cache
def reference(name: str) -> tuple[PlainModel, list[Batch], Trajectory]:
    plain = plain_model(job(name))
    batches = make_batches(plain.job, STEPS)
    return plain, batches, plain.run(batches, RATE)


def sound(name: str) -> Ours:
    plain, batches, _ = reference(name)
    return Ours(plain, plain.job, plain.source, batches)


def proved(name: str, ours: Ours) -> list[Difference]:
    theirs = reference(name)[2]
    return differences(ours.run(), theirs, theirs)  # judged again, as a proof does where something is off


def swapped(source: Source, names: dict[str, str]) -> Source:
    return lambda name: source(names.get(name, name))


# ---- faults: each changes the Ours that it is given, or the code while it runs


def a_misstacked_layer(ours: Ours) -> None:
    up = "model.layers.{}.mlp.up_proj.weight"
    ours.source = swapped(ours.source, {up.format(0): up.format(1), up.format(1): up.format(0)})


def gate_and_up_transposed(ours: Ours) -> None:
    source = ours.source
    ours.source = lambda name: torch.roll(source(name)[:], 64, 1) if name.endswith("gate_up_proj") else source(name)


def targets_off_by_one(ours: Ours) -> None:
    ours.batches = [{**batch, "labels": batch["labels"].roll(-1, 1)} for batch in ours.batches]


def a_sliding_window_forgotten(ours: Ours) -> None:
    ours.job = job("dense", sliding_window=None)


def a_wrong_rope(ours: Ours) -> None:
    ours.job = job("dense", rope_parameters={"rope_type": "default", "rope_theta": 20_000.0})


def a_missing_clip(ours: Ours) -> None:
    ours.job = job("dense", {"max_grad_norm": 0.0})


def weight_decay_forgotten(ours: Ours) -> None:
    ours.job = job("dense", {"weight_decay": 0.0})


def a_missing_auxiliary_loss(ours: Ours) -> None:
    ours.job = job("experts", compute={"router_loss": False})


def dropped_tokens(ours: Ours) -> None:
    ours.job = job("experts", compute={"experts": "capacity", "capacity_factor": 0.5})


def a_lost_normalisation(ours: Ours) -> None:
    def after(placed: PlacedModel) -> None:
        norm = placed.model.get_submodule("model.layers.1.input_layernorm")
        norm.forward = lambda x: x * norm.weight  # type: ignore[method-assign]

    ours.after = after


def a_stale_scale(ours: Ours) -> None:
    def after(placed: PlacedModel) -> None:
        placed.model.get_submodule("model.layers.0.self_attn").scaling *= 1.01  # type: ignore[operator]

    ours.after = after


def a_wrong_denominator(ours: Ours) -> None:
    """Divide by all tokens, and not by those that are scored."""

    def after(placed: PlacedModel) -> None:
        rows = torch.tensor(float(ours.batches[0]["labels"][:, 1:].numel()))
        placed.loss.objective.counts = lambda batch: rows.to(batch["labels"].device)  # type: ignore[method-assign]

    ours.after = after


def a_dropped_router_gradient(ours: Ours) -> None:
    def after(placed: PlacedModel) -> None:
        router: nn.Module = placed.model.get_submodule("model.layers.0.mlp.gate")
        own = router.forward

        def forward(*args: Any) -> Any:
            logits, scores, chosen = own(*args)
            return logits, scores.detach(), chosen

        router.forward = forward  # type: ignore[method-assign]

    ours.after = after


@contextlib.contextmanager
def _sums(change: Callable[[Any, Any], Any]) -> Iterator[None]:
    """Inside, each device's part of a gradient is changed before parts are summed over devices."""
    own = partial_gradients._sum_shards
    partial_gradients._sum_shards = lambda x, *, how: own(change(x, how), how=how)
    try:
        yield
    finally:
        partial_gradients._sum_shards = own


def _is_first(how: partial_gradients.Sum, axis: str) -> Any:
    """Whether this device is the first along ``axis``, which may be cut into rings of other names."""
    rings = tuple(name for name, _ in how.manual.axes if name.partition(".")[0] == axis)
    return jax.lax.axis_index(rings) == 0


def a_forgotten_reduction(ours: Ours) -> Any:
    """Keep the first device's part alone."""
    return _sums(lambda x, how: x * _is_first(how, "fsdp"))


def a_doubled_gradient(ours: Ours) -> Any:
    """One parameter's gradient is summed twice."""
    return _sums(lambda x, how: 2 * x if "embed_tokens" in how.name else x)


def a_sum_over_the_wrong_axis(ours: Ours) -> Any:
    """Sum over fsdp alone, where rows are split over fsdp and expert."""
    return _sums(lambda x, how: x * _is_first(how, "expert"))


# fault → the model, and the quantity that must be off
TABLE: dict[Callable[[Ours], Any], tuple[str, str]] = {
    a_misstacked_layer: ("dense", "gradient"),
    targets_off_by_one: ("dense", "loss"),
    a_sliding_window_forgotten: ("dense", "gradient"),
    a_wrong_rope: ("dense", "gradient"),
    a_missing_clip: ("dense", "first moment"),
    weight_decay_forgotten: ("dense", "weight"),
    a_lost_normalisation: ("dense", "gradient"),
    a_stale_scale: ("dense", "gradient"),
    a_wrong_denominator: ("dense", "loss"),
    a_forgotten_reduction: ("dense", "gradient"),
    a_doubled_gradient: ("dense", "gradient"),
    gate_and_up_transposed: ("experts", "gradient"),
    a_missing_auxiliary_loss: ("experts", "loss"),
    dropped_tokens: ("experts", "gradient"),
    a_dropped_router_gradient: ("experts", "gradient"),
    a_sum_over_the_wrong_axis: ("experts", "gradient"),
}
QUICK = {a_misstacked_layer, targets_off_by_one}


@pytest.mark.parametrize("name", ["dense", pytest.param("experts", marks=pytest.mark.slow)])
def test_a_sound_recipe_is_proved(name: str) -> None:
    assert [each for each in proved(name, sound(name)) if not each.good] == []


@pytest.mark.parametrize(
    "fault",
    [fault if fault in QUICK else pytest.param(fault, marks=pytest.mark.slow) for fault in TABLE],
    ids=lambda fault: fault.__name__,
)
def test_a_planted_fault_is_caught(fault: Callable[[Ours], Any]) -> None:
    model, quantity = TABLE[fault]
    ours = sound(model)
    with fault(ours) or contextlib.nullcontext():
        found = proved(model, ours)
    bad = [each for each in found if not each.good]
    worst = max((each for each in bad if each.quantity == quantity), key=lambda each: each.off, default=None)
    assert worst is not None, f"only {bad}"
    print(f"{fault.__name__}: {quantity} of {worst.name} off by {worst.off:.1e}; {len(bad)} of {len(found)} off")
