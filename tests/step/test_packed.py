"""A frozen model in 8-bit integers: its numbers are those of the plain model with the rounded weights."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import UserError
from shardwright.models.adapters.int8 import SCALE, from_int8, to_int8
from shardwright.models.adapters.lora import base_of
from shardwright.weights.place import with_int8
from shardwright.weights.weight_sources import state_dict_weights
from tests.step.test_adapters import check_gradients
from tests.support.adapters import make_adapted
from tests.support.jobs import job_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2


def test_a_value_is_off_by_half_a_scale_at_most_and_rounding_again_changes_nothing():
    weight = torch.randn(3, 5, 64, generator=torch.Generator().manual_seed(0))
    weight[0, 0] = 0
    values, scale = to_int8(weight)
    assert (values.dtype, scale.shape) == (torch.int8, (3, 5, 1))
    rounded = from_int8(values, scale, torch.float32)
    assert ((rounded - weight).abs() <= scale * 0.50001).all()
    again, _ = to_int8(rounded)
    assert torch.equal(again, values)
    assert values.abs().amax(-1).tolist() == [[0, *[127] * 4], [127] * 5, [127] * 5]


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_no_finite_number_is_refused_by_name(value):
    plan = job_of("llama_fsdp", lora_r=4, base_dtype="int8").stored
    name = "model.layers.1.mlp.up_proj.weight"
    weight = torch.ones(128, 64)
    weight[3, 5] = value
    with pytest.raises(UserError, match=f"{name} in int8"):
        _ = with_int8(state_dict_weights({name: weight}), plan)(name)[slice(0, 128), slice(0, 64)]


@pytest.mark.parametrize(
    ("recipe", "options", "compute"),
    [
        ("llama_tp", {}, {}),
        ("mixtral_ep", {}, {"experts": "capacity"}),  # experts with capacity, whose weights are gathered as integers
        ("mixtral_ep_tp", {}, {}),
        ("gpt_oss_ep", {}, {"scan": False}),  # weights stored the other way round, and biases
    ],
    ids=str,
)
def test_loss_and_gradients_are_pefts_on_the_rounded_model(recipe, options, compute):
    adapted = make_adapted(recipe, options={"base_dtype": "int8", **options}, **compute)
    check_gradients(adapted)
    after = adapted.case.parameters()
    assert any(values.dtype == torch.int8 for values in after.values())


def test_linear_layers_and_experts_are_integers_with_scales_and_all_else_is_bfloat16():
    job = job_of("mixtral_ep", lora_r=4, base_dtype="int8")
    found = {entry.name: entry for entry in job.stored.parameters}
    integers = {name for name, entry in found.items() if entry.dtype == torch.int8}
    scales = {name for name in found if name.endswith(SCALE)}
    assert {name + SCALE for name in integers} == scales
    assert {name.rpartition(".*.")[2] for name in integers} == {
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    others = [e for n, e in found.items() if n not in integers | scales and base_of(n) is None]
    assert {entry.dtype for entry in others} == {torch.bfloat16}
    assert not any(found[name].trained for name in integers | scales)
    down = found["model.layers.*.mlp.experts.down_proj"]
    assert down.bytes_per_device == torch.tensor(down.local_shape).prod().item()
    assert found[down.name + SCALE].shape == (*down.shape[:-1], 1)
    assert 2 not in {
        s.dim - 1 for s in found[down.name + SCALE].layout.values()
    }  # the last dimension has no more parts


def test_each_row_is_read_once_whatever_devices_hold_of_it():
    reads = []

    class Counted:
        shape, dtype = (4, 8, 16), torch.float32

        def __getitem__(self, where):
            reads.append(where)
            return torch.ones(self.shape)[where]

    name = "model.layers.0.mlp.experts.down_proj"
    source = with_int8(lambda _: Counted(), job_of("mixtral_ep", lora_r=4, base_dtype="int8").stored)
    for device in range(8):
        rows = slice(device % 4, device % 4 + 1), slice(0, 8)
        half = slice(8 * (device // 4), 8 * (device // 4) + 8)
        assert torch.equal(source(name)[(*rows, half)], torch.full((1, 8, 8), 127, dtype=torch.int8))
    for expert in range(4):
        scale = source(name + SCALE)[slice(expert, expert + 1), slice(0, 8), slice(0, 1)]
        assert torch.allclose(scale, torch.full((1, 8, 1), 1 / 127))
    assert len(reads) == 4
