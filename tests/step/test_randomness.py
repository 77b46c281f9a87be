"""Dropout, router jitter and sampling: one key a step, micro-batch, layer and site, whatever computes it and how often.

The reference is the plain transformers model on the CPU, eager, whose draws numpy computes from the same keys.
"""

from __future__ import annotations

import copy
from functools import cache

import pytest
import torch
import torch.nn.functional as F
from transformers import Starcoder2Config

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Shard
from shardwright.layout.recipe import Compute, Recipe
from shardwright.models.layers.decoder_layers import number_layers
from shardwright.models.ops import random_bits, randomness
from shardwright.models.ops.labels import scored_tokens
from shardwright.xla import sharding
from tests.support.cases import Case, check_near, make_batch, make_case, small_config

SMALL = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "initializer_range": 0.2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "attention_dropout": 0.2}
DENSE = Starcoder2Config(**SMALL, **HEADS, residual_dropout=0.1, embedding_dropout=0.1)
# every expert serves every token: else the loss is not smooth where a token changes its expert
MOE = {**SMALL, **HEADS, "num_local_experts": 2, "num_experts_per_tok": 2, "router_jitter_noise": 0.3}
STARCODER2 = Recipe(
    name="starcoder2",
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={
        "model.embed_tokens.weight": {"fsdp": Shard(0)},
        "model.layers.*.self_attn.*_proj.weight": {"fsdp": Shard(0)},
        "model.layers.*.self_attn.*_proj.bias": {},
        "model.layers.*.mlp.c_*.weight": {"fsdp": Shard(1)},
        "model.layers.*.mlp.c_*.bias": {},
        "model.layers.*.*layernorm.*": {},
        "model.norm.*": {},
        "lm_head.weight": {"fsdp": Shard(0)},
    },
    compute=Compute(),
)
SETTINGS = [(True, "full"), (True, "none"), (True, "save_matmuls"), (False, "full"), (False, "none")]


def moe_case(**how) -> Case:
    recipe = load_recipe("mixtral_ep")
    how = {"mesh": "fsdp=4,expert=2", "router_loss": False, **how}
    return make_case(recipe, small_config(recipe, **MOE), **how)


def reference(
    case: Case, batch: dict[str, torch.Tensor], step: int = 1, *, backward: bool = True
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the plain model, from the keys of the case's step."""
    model, count = copy.deepcopy(case.reference), case.step.accumulation
    number_layers(model)
    tokens = scored_tokens(batch["labels"]) / count
    total = 0.0
    for number in range(count):
        rows = {name: t[number::count] for name, t in batch.items()}
        key = torch.tensor(random_bits.key_of(f"{case.step.seed}/{step}/{number}"), dtype=torch.int32)
        with randomness.drawing(key):
            loss = model(**rows, num_items_in_batch=tokens, use_cache=False).loss / count
        if backward:
            loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def _unstacked(case: Case, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Host tensors by parameter as it is stored, under the model's own names."""
    pairs = ((case.plan.members(name), name, t) for name, t in tensors.items())
    return {
        member: part
        for members, name, t in pairs
        for member, part in zip(members, t.unbind() if members != [name] else [t], strict=True)
    }


@cache
def dense_reference() -> tuple[float, dict[str, torch.Tensor]]:
    return reference(make_case(STARCODER2, DENSE), make_batch(DENSE))


def check(case: Case, expected: tuple[float, dict[str, torch.Tensor]]) -> None:
    """One compile; loss and gradients are the reference's; the gradient is the loss's; other steps draw otherwise."""
    batch = make_batch(case.config)
    case.step.max_grad_norm = 0.0

    def loss(step: int = 1) -> float:
        case.step(batch, step=step, learning_rate=0.0)  # a later compile would be refused here
        return case.step.read_metrics().loss

    here = loss()
    # after one step a first moment is a tenth of the gradient
    gradients = {name: sharding.fetch(first) * 10 for name, (first, _) in case.step.moments.items()}
    assert here == pytest.approx(expected[0], rel=1e-5)
    check_near(_unstacked(case, gradients), expected[1])
    assert len({here, loss(step=2), loss(step=3)}) == 3
    weights = {name: sharding.fetch(p.detach()) for name, p in case.step.parameters.items()}
    squared = sum(g.double().square().sum().item() for g in gradients.values())
    size = 0.01 / squared**0.5

    def loss_at(distance: float) -> float:
        for name, weight in weights.items():
            moved = weight + distance * gradients[name]
            case.step.parameters[name] = sharding.place(name, moved, case.mesh, case.plan.specs[name])
        return loss()

    slope = (loss_at(size) - loss_at(-size)) / (2 * size)
    assert slope / squared == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "scan", "remat"),
    # an attention draws in its own lines, and a scan and remat repeat what any draws
    [("shardwright", *each) for each in SETTINGS] + [("eager", True, "full"), ("sdpa", False, "none")],
)
def test_dropout_of_attention_residuals_and_embeddings_is_the_references_in_every_setting(attention, scan, remat):
    check(make_case(STARCODER2, DENSE, attention=attention, scan=scan, remat=remat), dense_reference())


@pytest.mark.slow
@pytest.mark.parametrize(("scan", "remat"), [(True, "full"), (False, "none")])
def test_router_jitter_and_attention_dropout_are_the_references_in_every_micro_batch(scan, remat):
    case = moe_case(accumulation=2, scan=scan, remat=remat)
    check(case, reference(case, make_batch(case.config)))


def test_what_a_step_draws_depends_on_the_seed_and_its_number_alone_and_evaluation_draws_nothing():
    case = make_case(STARCODER2, DENSE, remat="full")
    batch = make_batch(case.config)
    case.step(batch, step=3, learning_rate=0.0)  # as after a resume: no step was before it
    found = case.step.read_metrics().loss
    assert found == pytest.approx(reference(case, batch, step=3)[0], rel=1e-5)
    case.step.seed += 1
    assert found != pytest.approx(reference(case, batch, step=3)[0], rel=1e-5)
    plain = case.reference.eval()(**batch, use_cache=False).loss.item()
    assert case.evaluation([batch]).loss == pytest.approx(plain, rel=1e-5)


def test_every_site_layer_micro_batch_and_step_draws_from_a_key_or_number_of_its_own(monkeypatch):
    drawn: list[tuple[int, int, int]] = []
    original = random_bits._bits

    def recorded(key, rows, shape, site, xp):
        drawn.append((*key.tolist(), site))
        return original(key, rows, shape, site, xp)

    monkeypatch.setattr(random_bits, "_bits", recorded)
    case = moe_case(accumulation=2)
    with torch.no_grad():
        for step in (1, 2):
            reference(case, make_batch(case.config), step, backward=False)
    sites = 2  # attention weights, and the router's input
    assert len(drawn) == len(set(drawn)) == 2 * 2 * 2 * sites


HOOKS = {
    "normal_": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: F.alpha_dropout(x, 0.1, training=True),
    "rand at modeling_starcoder2.py": lambda x: x if torch.rand([]) < 0.5 else 2 * x,
    "the host": lambda x: x * torch.randperm(3)[0].item(),
}


def test_what_cannot_be_drawn_from_a_key_is_refused_by_name_before_anything_compiles():
    case = make_case(STARCODER2, DENSE, scan=False)
    for name, draw in HOOKS.items():
        norm = case.step.loss.model.get_submodule("model.norm")
        handle = norm.register_forward_pre_hook(lambda _, inputs, draw=draw: (draw(inputs[0]),))
        with pytest.raises(UserError, match=name):
            case.step(make_batch(DENSE), step=1, learning_rate=0.0)
        with pytest.raises(UserError, match=name):
            case.evaluation([make_batch(DENSE)])
        handle.remove()
    assert case.step.compiles == 0


def test_a_layer_that_draws_in_a_way_that_cannot_be_repeated_is_refused_when_it_is_traced():
    case = make_case(STARCODER2, DENSE, remat="full")
    layer = case.step.loss.model.get_submodule("model.layers.*.mlp")
    layer.register_forward_pre_hook(lambda _, inputs: (HOOKS["normal_"](inputs[0]),))
    with pytest.raises(UserError, match="normal_"):
        case.step(make_batch(DENSE), step=1, learning_rate=0.0)
