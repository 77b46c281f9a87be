"""Experts on the CPU against transformers' own eager loop: routing, capacity, dropping, gradients, binding."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import GptOssConfig, Llama4TextConfig, MixtralConfig, MixtralForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.llama4.modeling_llama4 import Llama4TextMoe
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from shardwright.models.experts import expert_families
from shardwright.models.experts.capacity import Capacity, _owners, _slots
from shardwright.models.experts.dropless import Dropless
from shardwright.models.experts.experts_interface import bind
from shardwright.models.experts.projections import dense
from shardwright.models.layers import side_outputs

T, H, E, K = 24, 16, 4, 2


def mixtral():
    torch.manual_seed(0)
    experts = MixtralExperts(MixtralConfig(hidden_size=H, intermediate_size=32, num_local_experts=E))
    return _initialised(experts)


def gpt_oss():
    """Experts in the other storage that families use: transposed weights, biases, interleaved gate and up."""
    torch.manual_seed(0)
    experts = GptOssExperts(GptOssConfig(hidden_size=H, intermediate_size=32, num_local_experts=E))
    return _initialised(experts)


def _initialised(experts):
    _drawn(experts)
    experts.config._experts_implementation = "eager"
    return experts


def _drawn(block):
    for parameter in block.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return block


def routing(kind: str):
    """Top-2 indices [T, K] and normalised weights."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(T, E, generator=generator)
    if kind == "skewed":
        logits[:, 0] += 2.0
    if kind == "all to one pair":
        logits[:, 0], logits[:, 1] = 9.0, 8.0
    weights, index = logits.softmax(-1).topk(K, -1)
    return index, (weights / weights.sum(-1, keepdim=True)).detach()


def outputs_and_gradients(function, experts, index, weights):
    """The output, and the gradients of hidden, routing weights and parameters."""
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(2)).requires_grad_()
    weights = weights.clone().requires_grad_()
    y = function(experts, x, index, weights)
    direction = torch.randn(T, H, generator=torch.Generator().manual_seed(3))
    return y, *torch.autograd.grad((y * direction).sum(), [x, weights, *experts.parameters()])


@pytest.mark.parametrize("make", [mixtral, gpt_oss])
@pytest.mark.parametrize("kind", ["balanced", "skewed", "all to one pair"])
@pytest.mark.parametrize(
    "function", [dense, Capacity(factor=E / K), Capacity(factor=E / K, groups=4)], ids=["dense", "capacity", "4 groups"]
)
def test_where_nothing_can_drop_output_and_gradients_are_the_eager_models(make, kind, function):
    experts, (index, weights) = make(), routing(kind)
    expected = outputs_and_gradients(lambda module, *args: module(*args), experts, index, weights)
    for ours, theirs in zip(outputs_and_gradients(function, experts, index, weights), expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("top_k", [1, 2])
@pytest.mark.parametrize("kernel", ["dense", "capacity"])
def test_a_block_that_scales_its_experts_inputs_is_routed_and_gives_its_own_numbers(kernel, top_k):
    torch.manual_seed(0)
    config = Llama4TextConfig(
        hidden_size=H, intermediate_size=32, num_local_experts=E, num_experts_per_tok=top_k, head_dim=4
    )
    plain = _drawn(Llama4TextMoe(config))
    routed = copy.deepcopy(plain)
    expert_families.adapt(routed)
    routed.experts.implementation = kernel
    if kernel == "capacity":  # one call for each choice, and room for all tokens
        bind(routed, ["experts"], Capacity(factor=E))
    x = torch.randn(2, T, H)
    results = []
    for block in (plain, routed):
        out, logits = block(x)
        direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        gradients = torch.autograd.grad((out * direction).sum(), [*block.parameters()])
        results.append([out, logits, *gradients])
    assert list(dict(plain.named_parameters())) == list(dict(routed.named_parameters()))
    for ours, theirs in zip(*results, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5, rtol=1e-5)


EXPERTS = ["model.layers.0.mlp.experts", "model.layers.1.mlp.experts"]


def tiny_mixtral() -> MixtralForCausalLM:
    config = MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
    )
    torch.manual_seed(0)
    return MixtralForCausalLM(config)


@pytest.mark.parametrize("name", ["dense", "capacity"])
def test_transformers_knows_the_kernels_by_name_and_evaluates_to_the_eager_loss(name):
    model = tiny_mixtral().eval()
    tokens = torch.randint(0, 32, (2, 12))
    model.set_experts_implementation("eager")
    expected = model(tokens, labels=tokens).loss.item()
    model.set_experts_implementation(name)
    assert model(tokens, labels=tokens).loss.item() == pytest.approx(expected, rel=1e-5)


def dropped(model: MixtralForCausalLM) -> list[float]:
    """The fraction of (token, choice) pairs that each layer drops in training."""
    tokens = torch.randint(0, 32, (2, 12), generator=torch.Generator().manual_seed(0))
    _, metrics = side_outputs.collect_metrics(lambda: model.train()(tokens))
    pairs = zip(metrics[" dropped"], metrics[" load"], strict=True)
    return [(lost.sum() / load.sum()).item() for lost, load in pairs]


def test_models_bound_to_different_kernels_each_keep_theirs_also_in_copies_and_nothing_is_registered():
    before = len(ALL_EXPERTS_FUNCTIONS)
    tight, roomy, plain = tiny_mixtral(), tiny_mixtral(), tiny_mixtral()
    bind(tight, EXPERTS, Capacity(factor=0.5))
    bind(roomy, EXPERTS, Capacity(factor=4 / 2))
    for model in (tight, roomy, plain):
        model.set_experts_implementation("capacity")
    for model in (tight, copy.deepcopy(tight)):
        assert min(dropped(model)) >= 0.5
    assert dropped(roomy) == dropped(copy.deepcopy(roomy)) == [0.0, 0.0]
    assert min(dropped(plain)) < 0.5
    assert len(ALL_EXPERTS_FUNCTIONS) == before


def test_a_module_bound_to_another_kernel_than_the_model_was_told_is_refused():
    model = tiny_mixtral()
    bind(model, EXPERTS, Dropless())
    model.set_experts_implementation("capacity")
    with pytest.raises(ValueError, match="'capacity' on a module that is bound to Dropless"):
        model(torch.zeros(1, 4, dtype=torch.int64))


def test_first_choices_are_seated_before_second_choices():
    index = torch.tensor([[0, 0, 1, 1, 1, 0]])  # choice-major: three first choices, then three second ones
    assert _slots(index, E=2, C=2).tolist() == [[0, 1, 2, 3, 4, 4]]  # 4 = no seat: both are second choices


def test_owners_invert_slots():
    slots = torch.tensor([[0, 3, 4, 1]])
    assert _owners(slots, M=4).tolist() == [[0, 3, 4, 1]]  # slot 2 is empty (4 = nobody); the dropped one owns nothing


def test_a_dropped_token_gives_nothing_and_the_fraction_is_recorded():
    experts, (index, weights) = mixtral(), routing("all to one pair")
    kernel = Capacity(factor=1.0)  # T*K/E = 12 slots an expert, wanted by all 24 tokens
    x = torch.randn(T, H)
    y, metrics = side_outputs.collect_metrics(lambda: kernel(experts, x, index, weights))
    assert metrics[" dropped"][0].tolist() == [T * K / 2]
    assert metrics[" load"][0].tolist() == [[T, T, 0, 0]]
    kept = dense(experts, x, index, weights)
    assert torch.allclose(y[:12], kept[:12], atol=1e-5)
    assert torch.equal(y[12:], torch.zeros(12, H))


def test_padding_takes_no_token_s_slot():
    experts, (index, weights) = mixtral(), routing("all to one pair")
    x, real = torch.randn(T, H), (torch.arange(T) >= T // 2).to(torch.float32).reshape(2, -1)  # padding comes first
    with side_outputs.given(real):
        y, metrics = side_outputs.collect_metrics(lambda: Capacity(factor=1.0)(experts, x, index, weights))
    assert metrics[" dropped"][0].tolist() == [0]
    assert metrics[" load"][0].tolist() == [[T / 2, T / 2, 0, 0]]
    assert torch.allclose(y[T // 2 :], dense(experts, x, index, weights)[T // 2 :], atol=1e-5)
    assert torch.equal(y[: T // 2], torch.zeros(T // 2, H))


def test_capacity_is_never_more_than_can_be_filled():
    assert Capacity(factor=100.0).slots(tokens=24, top_k=2, experts=4) == 24
    assert Capacity(factor=1.25).slots(tokens=24, top_k=2, experts=4) == 15
