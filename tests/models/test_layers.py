"""Stacking a decoder's layers: names, shapes, and what can't be stacked. (Its numbers: test_parity.py.)"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DeepseekV3Config, Gemma2Config, LlamaConfig

from shardwright.layout.stacking import layer_names
from shardwright.model.meta_model import meta_model
from shardwright.models.experts import experts_interface as experts
from shardwright.models.layers.decoder_layers import stack_layers
from shardwright.models.layers.layer_inputs import as_given, as_passed
from tests.support.random_layers import compare

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
# one dense layer, then layers of experts, whose routers have a buffer that is saved
DEEPSEEK = DeepseekV3Config(**{**SMALL, **MLA, **EXPERTS, "num_hidden_layers": 4, "num_key_value_heads": 4})


def test_a_stacked_parameter_has_the_recipes_own_name_and_a_dimension_of_layers_in_front():
    model = meta_model(LlamaConfig(**SMALL))
    plain = {name: tuple(p.shape) for name, p in model.named_parameters()}
    stack_layers(model)
    stacked = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert stacked["model.layers.*.self_attn.q_proj.weight"] == (3, *plain["model.layers.1.self_attn.q_proj.weight"])
    assert {name.replace(".0.", ".*.") for name in plain if ".1." not in name and ".2." not in name} == stacked.keys()
    assert sum(p.numel() for p in model.parameters()) == sum(torch.Size(s).numel() for s in plain.values())


def test_layers_that_repeat_are_stored_once_whatever_their_number():
    children = []
    for layers in (2, 6):
        model = meta_model(LlamaConfig(**{**SMALL, "num_hidden_layers": layers}))
        stack_layers(model)
        children.append([name for name, _ in model.model.layers.named_children()])
    assert children == [["*"], ["*"]]


def test_a_stack_is_named_by_the_slice_of_the_list_that_it_holds_and_its_buffers_are_stacked():
    model = meta_model(DEEPSEEK)
    experts.choose(model, "dense")
    plain = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    stack_layers(model)
    assert [name for name, _ in model.model.layers.named_children()] == ["0", "1:4"]
    stored = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    for name, shape in stored.items():
        members = layer_names(name, shape[0])
        assert [plain.pop(member) for member in members] == [shape if members == [name] else shape[1:]] * len(members)
    assert plain == {}
    assert stored["model.layers.1:4.mlp.gate.e_score_correction_bias"] == (3, 8)


def test_a_layer_of_the_new_list_has_the_attributes_and_the_class_of_the_old_one():
    model = meta_model(Gemma2Config(**{**SMALL, "num_hidden_layers": 4}, head_dim=8))
    before = list(model.model.layers)
    stack_layers(model)
    assert [layer.self_attn.sliding_window is not None for layer in model.model.layers] == [True, False, True, False]
    assert len(model.model.layers) == len(model.model.layers[:4]) == 4
    assert isinstance(model.model.layers[1], type(before[1]))


def test_a_copy_of_a_stacked_model_has_its_names_and_shapes_and_is_independent():
    model = meta_model(LlamaConfig(**SMALL))
    stack_layers(model)
    model.model.layers.configure(lambda parameters: parameters, "full")
    other = copy.deepcopy(model)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    assert {name: p.shape for name, p in other.named_parameters()} == shapes
    assert not {id(module) for module in model.modules()} & {id(module) for module in other.modules()}
    assert not {id(p) for p in model.parameters()} & {id(p) for p in other.parameters()}
    (run,), (copied,) = model.model.layers.runs, other.model.layers.runs
    assert copied.parts[0].layer is other.get_submodule("model.layers.*")
    run.graphs["a call"] = "graphs of this model"
    assert copied.graphs == copy.deepcopy(run).graphs == {}
    other.model.layers.configure(lambda parameters: {}, "none")
    assert run.prepare({"x": 1}) == {"x": 1}
    assert run.partition is not copied.partition


def test_a_model_without_a_layer_list_is_refused():
    with pytest.raises(ValueError, match="no list of layers"):
        stack_layers(nn.Sequential(nn.Linear(2, 2)))


class Backwards(nn.Module):
    """A decoder that runs its layers from the last to the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 4, device="meta")
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in range(3))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in reversed(list(self.layers)):
            x = layer(x)
        return x


def test_a_decoder_that_is_no_loop_over_its_layers_is_refused_with_the_reason_and_left_as_it_was():
    model = Backwards()
    with pytest.raises(ValueError, match="calls layer 2 after 0 others"):
        stack_layers(model)
    assert isinstance(model.layers[0], nn.Linear)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("scan", "remat"), [(True, "full"), (True, "none"), (False, "full"), (True, 0.5)])
def test_random_layers_give_plain_gradients_scanned_or_not_with_remat_or_without(seed, scan, remat):
    worst, where, children = compare(100 + seed, scan=scan, remat=remat)
    assert worst < 1e-5, (where, children)


def test_what_a_layer_is_given_arrives_exactly():
    """Bools, integers of 64 bits, complex numbers: through a scan or not, whatever float32 could hold of them."""
    given = [
        torch.tensor([True, False]),
        torch.tensor([2**62 + 1, -(2**62) - 1]),
        torch.tensor([1 + 2j, 3 - 4j]),
        torch.tensor([1.5, 2.5], dtype=torch.bfloat16),
        torch.tensor([255, 0], dtype=torch.uint8),
    ]
    for tensor in given:
        assert torch.equal(as_given(as_passed(tensor), tensor.dtype), tensor)
