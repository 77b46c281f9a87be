"""LoRA gives PEFT's numbers: loss, every factor's gradient, and the factors after steps; the base is left alone."""

from __future__ import annotations

import pytest
import torch

from shardwright.layout.placement import Shard
from shardwright.models.adapters.lora import base_of
from tests.support.adapters import make_adapted
from tests.support.cases import make_batch, relative
from tests.support.jobs import job_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2


def check_gradients(adapted):
    batch = make_batch(adapted.case.config)
    (loss, gradients), (expected_loss, expected) = adapted.case.gradients(batch), adapted.reference_gradients(batch)
    assert loss == pytest.approx(expected_loss, rel=1e-5)
    worst, name = relative(gradients, expected)
    assert worst < 1e-5, f"{name} is off by {worst}"


@pytest.mark.parametrize(
    ("recipe", "accumulation", "options"), [("llama_tp", 2, {}), ("mixtral_ep", 1, {"use_rslora": True})], ids=str
)
def test_loss_gradients_and_adamw_steps_equal_pefts(recipe, accumulation, options):
    adapted = make_adapted(recipe, accumulation=accumulation, options=options)
    check_gradients(adapted)
    adapted.train_both(4, learning_rate=1e-3)
    after = adapted.case.parameters()
    ours = {name: values for name, values in after.items() if base_of(name) is not None}
    worst, name = relative(ours, adapted.in_our_form({k: p.detach() for k, p in adapted.theirs.items()}))
    assert worst < 1e-4, f"{name} is off by {worst} after 4 steps"
    assert relative(ours, adapted.start)[0] > 1e-3
    assert all(torch.equal(values, adapted.base[name]) for name, values in after.items() if name not in ours)


@pytest.mark.parametrize(
    ("recipe", "options", "compute"),
    [
        ("mixtral_ep_tp", {}, {}),
        ("mixtral_fsdp", {"lora_target": "q_proj,experts.down_proj"}, {"experts": "dropless", "scan": False}),
        ("gpt_oss_ep", {}, {}),  # weights stored the other way round, and biases
    ],
    ids=str,
)
def test_dropless_experts_give_pefts_loss_and_gradients(recipe, options, compute):
    check_gradients(make_adapted(recipe, options=options, **compute))


def test_the_frozen_model_has_neither_gradient_nor_moments_and_lies_in_bfloat16():
    job = job_of("mixtral_ep", lora_r=4)
    factors = [entry for entry in job.stored.parameters if base_of(entry.name) is not None]
    others = [entry for entry in job.stored.parameters if base_of(entry.name) is None]
    assert {entry.dtype for entry in others} == {torch.bfloat16}
    assert {entry.dtype for entry in factors} == {torch.float32}
    assert {entry.name for entry in others} == job.untrained
    size = sum(entry.bytes_per_device for entry in factors)
    assert job.plan.totals == {
        "parameters_bytes": size + sum(entry.bytes_per_device for entry in others),
        "gradients_bytes": size,
        "optimizer_bytes": 2 * size,
    }


def test_factors_get_their_layout_from_the_line_of_their_weight():
    plan = job_of("mixtral_ep_tp", lora_r=4).plan

    def layout(name):
        entry = plan[f"model.layers.0.{name}"]
        return {axis: placement.dim for axis, placement in entry.layout.items()}, entry.local_shape

    # the line: tensor splits the outputs, fsdp and expert store the inputs
    assert plan["model.layers.0.self_attn.q_proj.weight"].layout == {
        "fsdp": Shard(1),
        "expert": Shard(1),
        "tensor": Shard(0),
    }
    assert layout("self_attn.q_proj.weight_lora_A") == ({"fsdp": 1, "expert": 1}, (4, 32))
    assert layout("self_attn.q_proj.weight_lora_B") == ({"fsdp": 0, "expert": 0, "tensor": 0}, (16, 4))
    assert layout("mlp.experts.down_proj_lora_A") == ({"fsdp": 2, "expert": 0, "tensor": 2}, (4, 4, 64))
    assert layout("mlp.experts.down_proj_lora_B") == ({"fsdp": 1, "expert": 0}, (4, 64, 4))
