"""`models.attention.interface` against transformers' eager attention: numbers, memory, refusals, models, scans."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.debug.metrics as metrics
import torch_xla.distributed.spmd as xs
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as gemma2_eager
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward as gpt_oss_eager

from shardwright.models.attention import portable as portable_kernel
from shardwright.models.attention.across_layers import across_layers
from shardwright.models.attention.attention_interface import Attention
from shardwright.models.ops.randomness import drawing
from shardwright.prove.trajectory import relative
from tests.support.kernels import without_kernel

B, H, K, S, D = 4, 4, 2, 70, 16
SINGLE, LOOPED = 512, 16  # blocks for 70 positions: one, or five of which the last is not full
BANDED = 40  # queries in a band: two bands, of three blocks and of two
HEADS_SPLIT = (("data", "fsdp"), "tensor", None, None)
MODULE = SimpleNamespace(num_key_value_groups=H // K, training=False)


@pytest.fixture(autouse=True)
def portable_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """XLA has the portable attention; its kernel is tested in test_splash.py."""
    without_kernel(monkeypatch)


def make_inputs(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Query, key, value, sinks, and the gradient of the output."""
    torch.manual_seed(0)
    shapes = [(B, H, S, D), (B, K, S, D), (B, K, S, D), (H,), (B, S, H, D)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def make_segments() -> torch.Tensor:
    """Two packed sequences, then padding. Row 1 has padding in front too, and row 2 is padding alone."""
    segments = torch.ones(B, S, dtype=torch.long)
    segments[:, 30:], segments[:, 60:], segments[1, :5], segments[2] = 2, 0, 0, 0
    return segments


def eager(*tensors, segment_ids=None, sliding_window=None, softcap=None, with_sinks=False, dropout=0.0):
    """Transformers' eager attention with a mask, and with zeros in the rows of padding, where its own are arbitrary."""
    query, key, value, sinks = tensors
    distance = torch.arange(S)[:, None] - torch.arange(S)
    seen = ((distance >= 0) & (distance < (sliding_window or S)))[None]
    if segment_ids is not None:
        seen = seen & (segment_ids[:, :, None] == segment_ids[:, None, :])
    mask = torch.where(seen, 0.0, -1e30)[:, None].to(query.dtype)
    if with_sinks:
        module = SimpleNamespace(num_key_value_groups=H // K, training=dropout > 0, sinks=sinks)
        out, _ = gpt_oss_eager(module, query, key, value, mask, scaling=D**-0.5, dropout=dropout)
    else:
        module = SimpleNamespace(num_key_value_groups=H // K, training=dropout > 0)
        out, _ = gemma2_eager(module, query, key, value, mask, scaling=D**-0.5, softcap=softcap, dropout=dropout)
    return out if segment_ids is None else out * (segment_ids != 0)[:, :, None, None]


def portable(query, key, value, sinks, *, with_sinks=False, **options):
    s_aux = sinks if with_sinks else None
    return Attention()(MODULE, query, key, value, None, s_aux=s_aux, **options)[0]


def output_and_gradients(function, inputs, device="cpu", **options) -> list[torch.Tensor]:
    """The output and the gradients of query, key, value and, if they are used, sinks, computed on ``device``."""
    *tensors, grad_out = [t.detach().to(device).requires_grad_() for t in inputs]
    if device == "xla":
        mesh = xs.Mesh(np.arange(8), (2, 2, 2), ("data", "fsdp", "tensor"))
        for tensor in tensors[:3]:
            xs.mark_sharding(tensor, mesh, HEADS_SPLIT)
        options = {k: v.to("xla") if isinstance(v, torch.Tensor) else v for k, v in options.items()}
    with drawing(torch.tensor([1, 2], dtype=torch.int32, device=device)):
        out = function(*tensors, **options)
    used = tensors if options.get("with_sinks") else tensors[:3]
    results = [out, *torch.autograd.grad(out, used, grad_out)]
    torch_xla.sync()
    return [t.detach().cpu() for t in results]


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "packed and padded": {"segment_ids": make_segments()},
    "window and soft cap": {"segment_ids": make_segments(), "sliding_window": 7, "softcap": 2.0},
    "sinks and window": {"segment_ids": make_segments(), "sliding_window": 20, "with_sinks": True},
    "dropout": {"dropout": 0.3},
    "dropout, packed, soft cap": {"segment_ids": make_segments(), "softcap": 2.0, "dropout": 0.3},
    "dropout and sinks": {"sliding_window": 20, "with_sinks": True, "dropout": 0.3},
}


@pytest.mark.parametrize(("block", "band"), [(SINGLE, S), (LOOPED, S), (LOOPED, BANDED)])
@pytest.mark.parametrize("device", ["cpu", "xla"])
@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients_equal_eager(monkeypatch, case, device, block, band):
    monkeypatch.setattr(portable_kernel, "BLOCK", block)
    monkeypatch.setattr(portable_kernel, "BAND", band)
    inputs = make_inputs()
    theirs = output_and_gradients(eager, inputs, **CASES[case])
    ours = output_and_gradients(portable, inputs, device, **CASES[case])
    assert len(ours) == len(theirs)
    assert max(relative(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-6


@pytest.mark.parametrize("block", [SINGLE, LOOPED])
def test_bfloat16_stays_near_float32_and_keeps_its_dtype(monkeypatch, block):
    monkeypatch.setattr(portable_kernel, "BLOCK", block)
    inputs = make_inputs(torch.bfloat16)
    ours = output_and_gradients(portable, inputs, **CASES["packed and padded"])
    theirs = output_and_gradients(eager, [t.float() for t in inputs], **CASES["packed and padded"])
    assert {t.dtype for t in ours} == {torch.bfloat16}
    assert max(relative(a, b) for a, b in zip(ours, theirs, strict=True)) < 5e-3


@pytest.mark.parametrize("block", [SINGLE, LOOPED])
def test_padding_gives_zeros_and_its_gradients_are_zero(monkeypatch, block):
    monkeypatch.setattr(portable_kernel, "BLOCK", block)
    padding = make_segments() == 0
    out, *grads = output_and_gradients(portable, make_inputs(), segment_ids=make_segments())
    assert out[padding].eq(0).all()
    assert out[~padding].ne(0).all()
    for grad in grads:
        assert grad.isfinite().all()
        assert grad.transpose(1, 2)[padding].eq(0).all()


def test_a_packed_sequence_attends_as_if_it_were_alone(monkeypatch):
    monkeypatch.setattr(portable_kernel, "BLOCK", LOOPED)
    query, key, value, sinks, _ = make_inputs()
    packed = portable(query, key, value, sinks, segment_ids=make_segments())
    alone = portable(*(t[:, :, 30:60] for t in (query, key, value)), sinks)
    torch.testing.assert_close(packed[0, 30:60], alone[0])


def test_value_heads_may_have_a_width_of_their_own():
    query, key, value, sinks, _ = make_inputs()
    wide = portable(query, key, torch.cat([value, 2 * value], -1), sinks)
    out = portable(query, key, value, sinks)
    torch.testing.assert_close(wide, torch.cat([out, 2 * out], -1))


def test_nothing_saved_for_the_backward_grows_with_the_square_of_the_sequence():
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    inputs = [t.requires_grad_() for t in make_inputs()]
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        portable(*inputs[:4])
    assert saved
    assert max(saved) <= inputs[0].numel()


def lowered(length: int, dropout: float, loops: int) -> tuple[int, int]:
    """The HLO of forward and backward at ``length`` positions: elements of its largest buffer, and its instructions."""
    query, key, value = (torch.zeros(1, heads, length, D, device="xla", requires_grad=True) for heads in (H, K, K))
    with drawing(torch.tensor([1, 2], dtype=torch.int32, device="xla")):
        out, _ = Attention()(MODULE, query, key, value, None, dropout=dropout)
    grads = torch.autograd.grad(out.sum(), (query, key, value))
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    hlo = torch_xla._XLAC._get_xla_tensors_hlo([out, *grads])
    shapes = re.findall(r"(?:pred|[bfsu]+\d+)\[([\d,]+)\]", hlo)
    assert hlo.count(" while(") == loops
    return max(int(np.prod([int(n) for n in s.split(",")])) for s in shapes), hlo.count(" = ")


@pytest.mark.parametrize(("dropout", "bands"), [(0.0, portable_kernel.BANDS), (0.1, 1)])
def test_twice_the_sequence_takes_twice_the_memory_and_the_same_graph(monkeypatch, dropout, bands):
    monkeypatch.setattr(portable_kernel, "BLOCK", 64)
    (buffer, instructions), (buffer_twice, instructions_twice) = (lowered(n, dropout, 2 * bands) for n in (512, 1024))
    assert buffer == H * 64 * 512
    assert buffer_twice == 2 * buffer
    assert instructions_twice == instructions


@pytest.mark.parametrize("block", [SINGLE, LOOPED])
def test_inside_a_scanned_layer_gradients_equal_eager(monkeypatch, block):
    from functorch.compile import min_cut_rematerialization_partition
    from torch_xla.experimental import scan

    monkeypatch.setattr(portable_kernel, "BLOCK", block)
    # monkeypatch: torch_xla/experimental/scan.py, torch_xla 2.9. Its backward under SPMD needs torchax to lay gradients
    # out as the parameters are, and numbers do not depend on layouts.
    monkeypatch.setattr(scan, "shard_as", lambda a, b: (a, b))
    torch.manual_seed(0)
    layers, width = 3, H * D
    weights = torch.randn(layers, 4, width, width) * width**-0.5
    hidden, segments = torch.randn(B, S, width), make_segments()
    mesh = xs.Mesh(np.arange(8), (2, 2, 2), ("data", "fsdp", "tensor"))

    def layer(function, hidden, weight, segments):
        query, key, value = (
            (hidden @ weight[i]).view(B, S, -1, D).transpose(1, 2)[:, :heads] for i, heads in enumerate((H, K, K))
        )
        out = function(query, key, value, torch.zeros(H), segment_ids=segments)
        return hidden + out.reshape(B, S, width) @ weight[3]

    def scanned(carry, weight):
        hidden, segments = carry
        return (layer(portable, hidden, weight, segments.detach().to(torch.int32)), segments), None

    theirs_in = [hidden.clone().requires_grad_(), weights.clone().requires_grad_()]
    theirs = theirs_in[0]
    for i in range(layers):
        theirs = layer(eager, theirs, theirs_in[1][i], segments)
    ours_in = [hidden.to("xla").requires_grad_(), weights.to("xla").requires_grad_()]
    xs.mark_sharding(ours_in[0], mesh, (("data", "fsdp"), None, None))
    xs.mark_sharding(ours_in[1], mesh, (None, None, "fsdp", "tensor"))
    init = (ours_in[0], segments.float().to("xla"))
    (ours, _), _ = scan.scan(scanned, init, ours_in[1], partition_fn=min_cut_rematerialization_partition)
    ours_grads = torch.autograd.grad(ours.square().sum(), ours_in)
    torch_xla.sync()
    assert relative(ours.detach().cpu(), theirs) < 1e-6
    for a, b in zip(ours_grads, torch.autograd.grad(theirs.square().sum(), theirs_in), strict=True):
        assert relative(a.cpu(), b) < 1e-6


TINY = {"hidden_size": 32, "intermediate_size": 48, "vocab_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


@pytest.mark.parametrize("block", [SINGLE, LOOPED])
@pytest.mark.parametrize("family", [LlamaForCausalLM, MixtralForCausalLM])
def test_a_model_has_its_eager_loss_in_one_execution_without_fallbacks(monkeypatch, family, block):
    monkeypatch.setattr(portable_kernel, "BLOCK", block)
    torch.manual_seed(0)
    config = (LlamaConfig if family is LlamaForCausalLM else MixtralConfig)(num_key_value_heads=2, **TINY)
    config._attn_implementation = "eager"
    model = family(config)
    ids = torch.randint(0, 64, (2, 40))
    theirs = model(input_ids=ids, labels=ids, use_cache=False).loss
    theirs.backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}

    model.set_attn_implementation("shardwright")
    if family is MixtralForCausalLM:
        model.set_experts_implementation("batched_mm")
    model, ids = model.to("xla"), ids.to("xla")
    model.zero_grad()
    torch_xla.sync(wait=True)
    metrics.clear_all()
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    torch_xla.sync(wait=True)
    assert metrics.counter_value("ExecuteReplicated") == 1
    assert metrics.metric_data("TransferFromDeviceTime") is None
    assert [name for name in metrics.counter_names() if name.startswith("aten::")] == []
    assert relative(loss.detach().cpu(), theirs) < 1e-6
    for name, parameter in model.named_parameters():
        assert relative(parameter.grad.cpu(), expected[name]) < 1e-5, name


def test_segment_ids_reach_the_attention_through_the_model():
    torch.manual_seed(0)
    config = LlamaConfig(num_key_value_heads=2, **TINY)
    config._attn_implementation = "shardwright"
    model = LlamaForCausalLM(config)
    ids = torch.randint(0, 64, (1, 20))
    segments = torch.tensor([[1] * 12 + [2] * 8])
    positions = torch.cat([torch.arange(12), torch.arange(8)])[None]
    packed = model(input_ids=ids, position_ids=positions, segment_ids=segments, use_cache=False).logits
    alone = model(input_ids=ids[:, 12:], use_cache=False).logits
    torch.testing.assert_close(packed[:, 12:], alone)


def test_transformers_knows_the_attention_and_builds_no_mask_for_it():
    assert "shardwright" in ALL_ATTENTION_FUNCTIONS
    assert "shardwright" not in ALL_MASK_ATTENTION_FUNCTIONS


REFUSED: dict[str, dict[str, Any]] = {
    "an attention mask": {"attention_mask": torch.zeros(B, 1, S, S)},
    "attention dropout: nothing is random": {"dropout": 0.1},  # outside of `drawing`
    "not causal": {"is_causal": False},
    "70 queries against 69 keys": {"key": torch.zeros(B, K, S - 1, D)},
    "4 query heads over 3 key heads": {"key": torch.zeros(B, 3, S, D)},
    "segment_ids": {"segment_ids": torch.ones(B, S - 1)},
    "output_attentions": {"output_attentions": True},
    "'attention_bias'": {"attention_bias": torch.zeros(1)},
    "'cu_seq_lens_q'": {"cu_seq_lens_q": torch.zeros(1)},
    "sliding_window=32": {"module": SimpleNamespace(config=SimpleNamespace(sliding_window=32))},
    "attention_chunk_size=32": {"module": SimpleNamespace(config=SimpleNamespace(attention_chunk_size=32))},
}


@pytest.mark.parametrize("found", REFUSED)
def test_what_would_change_the_numbers_is_refused_by_name(found):
    query, key, value, *_ = make_inputs()
    asked = {"module": MODULE, "query": query, "key": key, "value": value, "attention_mask": None, **REFUSED[found]}
    with pytest.raises(ValueError, match=re.escape(found)):
        Attention()(**asked)


def test_what_leaves_the_numbers_alone_is_accepted():
    query, key, value, sinks, _ = make_inputs()
    module = SimpleNamespace(is_causal=True, config=SimpleNamespace(sliding_window=32))
    options = {"sliding_window": None, "position_ids": torch.arange(S)[None], "is_causal": None, "cu_seq_lens_q": None}
    out, weights = Attention()(module, query, key, value, None, **options)
    assert weights is None
    torch.testing.assert_close(out, portable(query, key, value, sinks))


@pytest.mark.parametrize("scaling", [None, 0.3])
def test_attention_over_earlier_layers_mixes_no_positions(scaling: float | None) -> None:
    """Inkling 2's, which transformers 5.24 calls as it calls attention over tokens."""
    query, states = torch.randn(2, S, 3, D), torch.randn(2, S, 5, D)
    expected = torch.nn.functional.scaled_dot_product_attention(query, states, states, scale=scaling)
    torch.testing.assert_close(across_layers(query, states, states, scaling), expected.transpose(1, 2))
