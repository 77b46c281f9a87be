"""Which layers repeat: found by what they are and what their decoder gives them, with no family named."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from shardwright.model.meta_model import meta_model
from shardwright.models.experts import experts_interface as experts
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.layers.decoder_layers import find_layers
from shardwright.models.layers.grouping import Repetition, cut, group

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}
GPT2 = {"vocab_size": 64, "n_embd": 32, "n_head": 4, "n_layer": 3}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}


def grouping(family: str, **values):
    model = meta_model(AutoConfig.for_model(family, **values))
    if experts_modules(model):
        experts.choose(model, "dense")
    return group(model, find_layers(model))


@pytest.mark.parametrize(
    ("layers", "runs"),
    [
        ("aaaa", [Repetition(0, 1, 4)]),
        ("abab", [Repetition(0, 2, 2)]),
        ("dmmmm", [Repetition(0, 1, 1), Repetition(1, 1, 4)]),
        ("dddmmmmm", [Repetition(0, 1, 3), Repetition(3, 1, 5)]),
        ("aaabaaabaa", [Repetition(0, 4, 2), Repetition(8, 1, 2)]),
        ("xlllglllgy", [Repetition(0, 1, 1), Repetition(1, 4, 2), Repetition(9, 1, 1)]),
        ("abc", [Repetition(0, 1, 1), Repetition(1, 1, 1), Repetition(2, 1, 1)]),
        ("a", [Repetition(0, 1, 1)]),
    ],
)
def test_layers_are_cut_so_that_as_few_as_can_be_are_traced(layers, runs):
    assert cut(layers, ["hidden"] * len(layers)) == runs


def test_a_run_ends_where_the_decoder_does_something_between_layers():
    chains = ["hidden"] * 6
    chains[4] = None
    assert cut("aaaaaa", chains) == [Repetition(0, 1, 4), Repetition(4, 1, 2)]


def test_a_run_ends_where_a_layer_takes_other_outputs_of_the_one_before():
    assert cut("aaaa", ["x", "x", "x", "y"]) == [Repetition(0, 1, 3), Repetition(3, 1, 1)]


@pytest.mark.parametrize(
    ("family", "values", "runs"),
    [
        ("llama", {"num_hidden_layers": 3, **SMALL}, [Repetition(0, 1, 3)]),
        ("gpt2", GPT2, [Repetition(0, 1, 3)]),
        ("gemma2", {"num_hidden_layers": 4, "head_dim": 8, **SMALL}, [Repetition(0, 2, 2)]),
        ("gemma3_text", {"num_hidden_layers": 13, "head_dim": 8, **SMALL}, [Repetition(0, 6, 2), Repetition(12, 1, 1)]),
        (
            "deepseek_v3",
            {"num_hidden_layers": 4, "first_k_dense_replace": 1, **EXPERTS, **SMALL},
            [Repetition(0, 1, 1), Repetition(1, 1, 3)],
        ),
        (
            "qwen3_next",
            {"num_hidden_layers": 8, "head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, **SMALL},
            [Repetition(0, 4, 2)],
        ),
        ("diffllama", {"num_hidden_layers": 3, **SMALL}, [Repetition(0, 1, 3)]),
    ],
)
def test_the_layers_of_a_family_are_cut_by_what_they_are(family, values, runs):
    assert list(grouping(family, **values).runs) == runs


def test_layers_whose_decoder_gives_them_other_arguments_of_their_own_run_as_one():
    """Its loop reads a list in the config with the layer's number."""
    found = grouping("granite_swa", **SMALL, num_hidden_layers=4, layer_rope_theta=[1e4, 2e4, 3e4, 4e4])
    assert list(found.runs) == [Repetition(0, 1, 1), Repetition(1, 1, 3)]


def test_a_layer_that_reads_its_own_number_is_like_no_other():
    assert list(grouping("gpt2", **GPT2, scale_attn_by_inverse_layer_idx=True).runs) == [
        Repetition(i, 1, 1) for i in range(3)
    ]


class Odd(nn.Module):
    """A decoder whose layers have an attribute each, of any kind."""

    def __init__(self, *kinds) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, device="meta") for _ in kinds)
        self.embed = nn.Embedding(8, 4, device="meta")
        for layer, kind in zip(self.layers, kinds, strict=True):
            layer.kind = kind

    def forward(self, input_ids, use_cache):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    "kinds",
    [
        (None, 1),
        (True, False),
        ("a", "b"),
        ((1, 2), (1, 3)),
        ({"a": 1}, {"a": 2}),
        (torch.tensor([1.0]), torch.tensor([2.0])),
        (torch.relu, torch.tanh),
        (torch.float32, torch.bfloat16),
        (object(), object()),
    ],
    ids=lambda kinds: type(kinds[0]).__name__,
)
def test_layers_that_differ_in_an_attribute_of_any_type_are_never_one(kinds):
    assert list(group(Odd(*kinds), "layers").runs) == [Repetition(0, 1, 1), Repetition(1, 1, 1)]
    same = Odd(kinds[0], kinds[0])
    assert list(group(same, "layers").runs) == [Repetition(0, 1, 2)]


def test_floats_that_differ_ride_along_as_data():
    found = group(Odd(0.5, 0.25, 0.125), "layers")
    assert (list(found.runs), found.floats) == ([Repetition(0, 1, 3)], {("", "kind")})
