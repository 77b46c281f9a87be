"""Parameters that take no part in the loss are found, named, and left as torch's own optimizers leave them."""

from __future__ import annotations

import pytest
import torch
from transformers import AfmoeConfig, BartConfig, Ernie4_5_MoeConfig, LlamaConfig, MixtralConfig

from shardwright import Compute, Mesh, Recipe
from shardwright.errors import UserError
from shardwright.model import facts
from shardwright.model.facts import facts_of
from shardwright.model.unused_parameters import notice, unused_parameters
from shardwright.models.tiny import tiny_config
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.sharding import fetch
from tests.support.cases import PLAIN_LAYERS, SMALL, after_steps, check_near, make_batch, make_case, train_both
from tests.support.jobs import job_of

RECIPE = Recipe(
    mesh=Mesh(fsdp=-1),
    batch=("fsdp",),
    parameters={},
    optional={".".join("*" * depth): {} for depth in range(2, 9)},
    compute=Compute(router_loss=False, dtype="float32", remat="full"),
    name="any",
)
# a decoder that could look at an encoder: the weights of that attention have no gradient, and are matrices that decay
BART = BartConfig(
    vocab_size=256,
    d_model=64,
    decoder_layers=2,
    decoder_ffn_dim=128,
    decoder_attention_heads=4,
    encoder_layers=1,
    encoder_ffn_dim=64,
    max_position_embeddings=256,
    dropout=0.0,
    is_decoder=True,
    is_encoder_decoder=False,
)
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
ERNIE = Ernie4_5_MoeConfig(
    **SMALL, **HEADS, moe_num_experts=4, moe_k=2, moe_intermediate_size=32, moe_layer_start_index=0
)


def check(case, steps=3, learning_rate=1e-2):
    """Loss, gradients and weights after ``steps`` equal the plain model's; returns the gradients."""
    # a key's bias has no gradient but rounding noise, which Adam makes as large as any other
    batch, noise = make_batch(case.config), "k_proj.bias"
    loss, gradients = case.first_step(batch, learning_rate)
    expected_loss, expected = case.clipped_reference_gradients(batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    assert gradients.keys() == expected.keys()
    train_both(case, steps, learning_rate=learning_rate, taken=1)
    for ours, theirs, tolerance in (
        (gradients, expected, 1e-5),
        (case.parameters(), dict(case.reference.named_parameters()), 1e-4),
    ):
        compared = [{k: t for k, t in tensors.items() if noise not in k} for tensors in (ours, theirs)]
        check_near(*compared, tolerance)
    return gradients


@pytest.mark.parametrize(
    ("accumulation", "layers", "compute"),
    [
        (1, 2, {}),
        (2, 2, {"reduce_gradients": "step"}),
        (2, 1, {"scan": False}),
        (1, 1, PLAIN_LAYERS),
    ],
    ids=str,
)
def test_what_takes_no_part_in_the_loss_stays_as_it_is_and_the_rest_equals_the_plain_model(
    accumulation, layers, compute
):
    config = BartConfig(**{**BART.to_dict(), "decoder_layers": layers})
    case = make_case(RECIPE, config, accumulation=accumulation, weight_decay=0.5, **compute)
    before = case.parameters()
    check(case)
    after, idle = case.parameters(), {name for name in before if "encoder_attn" in name}
    assert len(idle) == 10 * layers
    assert idle == {name for name in before if torch.equal(before[name], after[name])}
    assert not [name for name in case.step.moments if "encoder_attn" in name]


def test_a_stack_trains_the_layers_that_take_part_in_the_loss_and_no_other():
    case, name = make_case("llama_fsdp", weight_decay=0.5, attention="sdpa"), "self_attn.o_proj.weight"
    case.step.trained = {f"model.layers.*.{name}": [True, False]}
    frozen = case.reference.get_parameter(f"model.layers.1.{name}").requires_grad_(False)
    gradients = case.first_step(make_batch(case.config, rows=32), 1e-2)[1]
    assert [bool(gradients[f"model.layers.{layer}.{name}"].any()) for layer in (0, 1)] == [True, False]
    worst, worst_name = after_steps(case, 3, learning_rate=1e-2, taken=1, rows=32)
    assert worst < 1e-4, f"{worst_name} is off by {worst}"
    assert torch.equal(frozen, case.parameters()[f"model.layers.1.{name}"])


def test_moments_that_were_not_saved_because_there_were_none_begin_with_zeros():
    job, stack = job_of("llama_fsdp"), "model.layers.*.self_attn.q_proj.weight"
    shapes = {e.name: e.shape for e in (*job.plan.parameters, *job.stored.parameters)}

    def restored(name):
        if name.startswith((stack, "model.layers.1.self_attn.q_proj")):
            raise KeyError(name)
        return torch.ones(shapes.get(name.partition(" ")[0], (99,)))

    placed = place_model(job, build_mesh(job.recipe.mesh), lambda name: torch.zeros(shapes[name]))
    step = TrainStep(placed, restored)
    first = fetch(step.moments[stack][0])
    assert first[[0, 2, 3]].all()
    assert not first[1].any()
    assert fetch(step.moments["lm_head.weight"][1]).all()


def test_a_bias_that_only_chooses_experts_is_left_as_it_is():
    case = make_case(RECIPE, ERNIE, experts="dense")
    # Adam's first step is as long for a gradient of rounding as for any other: a router's, of experts not chosen
    gradients = check(case, steps=1, learning_rate=1e-3)
    assert "model.layers.1.mlp.gate.moe_statics.e_score_correction_bias" not in gradients


def names_of(config, router_loss=False):
    unused, why = unused_parameters(facts_of(config), None, router_loss)
    assert why is None
    return unused


def test_they_are_found_family_by_family_and_named_once():
    afmoe = AfmoeConfig(
        **SMALL, **HEADS, num_experts=4, num_experts_per_tok=2, num_dense_layers=1, moe_intermediate_size=32
    )
    assert names_of(afmoe) == {"model.layers.1.mlp.expert_bias"}
    assert len(names_of(BART)) == 20
    assert notice(names_of(ERNIE), None) == (
        "no part in the loss, and left as they are: model.layers.*.mlp.gate.moe_statics.e_score_correction_bias (2)"
    )
    assert names_of(LlamaConfig(**SMALL)) == set()
    assert notice(frozenset(), None) is None


def test_a_gradient_of_zero_is_not_a_missing_one():
    """With one expert a token, whose weight is 1, only the balancing loss moves a router; unseen experts nothing."""
    config = MixtralConfig(**SMALL, **HEADS, num_local_experts=8, num_experts_per_tok=1)
    assert names_of(config, router_loss=False) == names_of(config, router_loss=True) == set()


def test_a_model_that_reads_values_is_said_not_to_be_known():
    unused, why = unused_parameters(facts_of(tiny_config("blt")), None, router_loss=False)
    assert unused  # what the family itself freezes
    assert all(name.startswith("model.patcher.") for name in unused)
    assert "can't be tried without values (" in notice(unused, why)


def test_a_loss_in_which_nothing_takes_part_is_refused_without_a_weight_or_a_device(monkeypatch):
    monkeypatch.setattr(facts, "_known", {})  # the model is changed, and equal configs share it
    job = job_of("llama_fsdp")
    job.model.requires_grad_(False)
    with pytest.raises(UserError, match=r"none of its 39 parameters takes part in the loss"):
        job.trained  # noqa: B018 - raises
