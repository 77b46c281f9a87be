"""`models.attention.splash`: by each device's kernel, a TPU's interpreted, against the portable one; and lowered."""

from __future__ import annotations

import copy
import functools
import math
import re
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs
from torch import nn
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shardwright.models.attention import splash
from shardwright.models.attention.attention_interface import NAME, Attention, bind, mark_chunks
from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.ops.jax_call import lowering_for
from shardwright.models.ops.randomness import drawing
from shardwright.prove.trajectory import relative
from tests.support.kernels import interpreted

MODULE = SimpleNamespace()
# the sequence takes three blocks, of which the last is padded
B, K, S, D, E = 4, 2, 300, 64, 48
BLOCK = 128
# layout, and number of query heads: 4 for 2 key heads, or 3 for 1
LAYOUTS = {
    "one device": (KernelLayout(), 4),
    "batch over four, heads over two": (
        KernelLayout((("data", 2), ("fsdp", 2), ("tensor", 2)), ("data", "fsdp"), ("tensor",)),
        4,
    ),
    "more shards than key heads": (KernelLayout((("data", 2), ("tensor", 4)), ("data",), ("tensor",)), 4),
    "heads that do not divide": (KernelLayout((("data", 4), ("tensor", 2)), ("data",), ("tensor",)), 3),
    "devices in another order": (
        KernelLayout((("data", 4), ("tensor", 2)), ("data",), ("tensor",), (6, 7, 2, 3, 4, 5, 0, 1)),
        4,
    ),
}


@pytest.fixture(params=[nullcontext, interpreted], ids=["plain operations", "a TPU's kernel"])
def kernel(request, monkeypatch):
    """Attention by the kernel of virtual devices or of a TPU, in blocks of `BLOCK` tokens."""
    monkeypatch.setattr(splash, "BLOCK", 2 * BLOCK)  # of float32 it is halved
    with request.param():
        yield


def make_inputs(heads: int, dtype: torch.dtype = torch.float32, batch: int = B) -> list[torch.Tensor]:
    """Query, key, value, sinks, and the gradient of the output."""
    torch.manual_seed(0)
    keys = K if heads % K == 0 else 1
    shapes = [(batch, heads, S, D), (batch, keys, S, D), (batch, keys, S, E), (heads,), (batch, S, heads, E)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def make_segments() -> torch.Tensor:
    """Two packed sequences, then padding. Row 1 has padding in front too, and row 2 is padding alone."""
    segments = torch.ones(B, S, dtype=torch.long)
    segments[:, 140:], segments[:, 270:], segments[1, :30], segments[2] = 2, 0, 0, 0
    return segments


def output_and_gradients(
    inputs: list[torch.Tensor], layout: KernelLayout | None, segments=None, with_sinks=False, chunk=0, **options: Any
) -> list[torch.Tensor]:
    """The output and the gradients of query, key, value and, if they are used, sinks.

    They are the kernel's under ``layout``, or the portable attention's on the CPU if that is None.
    """
    function = Attention() if layout is None else Attention(layout)
    device = "cpu" if layout is None else "xla"
    *tensors, grad_out = [t.detach().to(device).requires_grad_() for t in inputs]
    if layout is not None and layout.axes:
        names, sizes = zip(*layout.axes, strict=True)
        mesh = xs.Mesh(np.array(layout.order or range(8)), sizes, names)
        for tensor in tensors[:3]:
            xs.mark_sharding(tensor, mesh, (layout.batch_axes, None, None, None))
    segments = None if segments is None else segments.to(device)
    sinks = tensors[3] if with_sinks else None
    layer = SimpleNamespace(config=SimpleNamespace(attention_chunk_size=chunk, layer_types=["chunked_attention"]))
    layer.layer_idx = 0
    if chunk:
        mark_chunks([layer])
    out, _ = function(layer if chunk else MODULE, *tensors[:3], None, segment_ids=segments, s_aux=sinks, **options)
    results = [out, *torch.autograd.grad(out, tensors[: 4 if with_sinks else 3], grad_out)]
    torch_xla.sync()
    return [t.detach().cpu() for t in results]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(relative(a, b) for a, b in pairs)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "a window of one block, a scale": {"sliding_window": BLOCK + 1, "scaling": 0.3},
    "chunks that are no blocks": {"chunk": BLOCK + 30},
    "packed and padded, soft cap": {"segments": make_segments(), "softcap": 2.0},
    "packed and padded, window and sinks": {"segments": make_segments(), "sliding_window": 20, "with_sinks": True},
}


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("causal", "one device"),
        ("a window of one block, a scale", "heads that do not divide"),
        ("chunks that are no blocks", "one device"),
        ("packed and padded, soft cap", "more shards than key heads"),
        ("packed and padded, window and sinks", "batch over four, heads over two"),
        ("packed and padded, window and sinks", "devices in another order"),
    ],
)
def test_output_and_gradients_equal_the_portable_attention(case, layout, kernel):
    layout, heads = LAYOUTS[layout]
    # all of it runs on each of the 8 devices where nothing is split
    inputs = make_inputs(heads, batch=B if layout.axes else 1)
    ours = output_and_gradients(inputs, layout, **CASES[case])
    assert worst(ours, output_and_gradients(inputs, None, **CASES[case])) < 2e-6
    if "segments" in CASES[case]:
        padding = make_segments() == 0
        assert ours[0][padding].eq(0).all()
        assert ours[0][~padding].ne(0).all()
        for grad in ours[1:4]:
            assert grad.transpose(1, 2)[padding].eq(0).all()


def test_bfloat16_stays_near_float32_and_keeps_its_dtype(kernel):
    layout, heads = LAYOUTS["batch over four, heads over two"]
    inputs = make_inputs(heads, dtype=torch.bfloat16)
    ours = output_and_gradients(inputs, layout, make_segments())
    theirs = output_and_gradients([t.float() for t in inputs], None, make_segments())
    assert {t.dtype for t in ours} == {torch.bfloat16}
    assert worst(ours, theirs) < 8e-3


def lowered_for_tpu(function: Any, heads: int, length: int, window: int | None = None, module: Any = MODULE) -> str:
    """The HLO of forward and backward. It can't run here, so none of its tensors may outlive this function."""
    with lowering_for("tpu"):
        query, key, value, grad_out = (
            torch.zeros(shape, dtype=torch.bfloat16, device="xla", requires_grad=True)
            for shape in [(8, heads, length, 128), *[(8, 2, length, 128)] * 2, (8, length, heads, 128)]
        )
        segments = torch.ones(8, length, dtype=torch.int32, device="xla")
        out, _ = function(module, query, key, value, None, segment_ids=segments, sliding_window=window)
        grads = torch.autograd.grad(out, [query, key, value], grad_out)
        # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
        return torch_xla._XLAC._get_xla_tensors_hlo([out, *grads])


@pytest.mark.parametrize("window", [None, 4096])
def test_for_a_tpu_it_is_three_kernels_and_nothing_grows_with_the_square_of_the_sequence(window):
    length = 131_072
    text = lowered_for_tpu(Attention(), 4, length, window)
    assert text.count('custom_call_target="tpu_custom_call"') == 3
    elements = [math.prod(map(int, dims.split(","))) for dims in re.findall(r"\w\d+\[([\d,]+)\]", text)]
    # the forward's sums of exponents, [batch, heads, sequence, 128 lanes], are the largest, with query and output
    assert max(elements) == 8 * 4 * length * 128
    assert len(text) < 200_000


def test_with_dropout_a_graph_for_a_tpu_has_the_portable_loops_in_place_of_the_kernel():
    with drawing(torch.tensor([1, 2], dtype=torch.int32, device="xla")):
        text = lowered_for_tpu(functools.partial(Attention(), dropout=0.1), 4, 4096)
    assert "tpu_custom_call" not in text
    assert text.count(" while(") == 2


def kernel_shapes(hlo: str) -> list[str]:
    """The result shapes of each kernel."""
    return re.findall(r'= (.+?) custom-call\(.*custom_call_target="tpu_custom_call"', hlo)


def test_for_a_tpu_each_device_runs_the_kernel_on_its_own_batch_and_heads():
    layout = KernelLayout((("data", 2), ("tensor", 4)), ("data",), ("tensor",))
    kernels = kernel_shapes(lowered_for_tpu(Attention(layout), 8, 4096))
    assert len(kernels) == 3
    # 8 sequences over 2; 8 query heads over 4; 2 key heads, each held by two devices
    assert "bf16[4,2,4096,128]" in kernels[0]
    assert any("bf16[4,1,4096,128]" in kernel for kernel in kernels)


def test_models_bound_to_different_layouts_each_keep_theirs_also_in_copies_and_nothing_is_registered():
    before = len(ALL_ATTENTION_FUNCTIONS), len(ALL_MASK_ATTENTION_FUNCTIONS)
    by_heads, by_batch, plain = (nn.Sequential(nn.Linear(2, 2)) for _ in range(3))
    bind(by_heads, KernelLayout((("data", 2), ("tensor", 4)), ("data",), ("tensor",)))
    bind(by_batch, KernelLayout((("data", 4), ("tensor", 2)), ("data",)))
    # [batch, query heads, sequence, value dimension] of a device: of 8 sequences and 8 heads
    expected = {by_heads: "bf16[4,2,4096,128]", by_batch: "bf16[2,8,4096,128]", plain: "bf16[8,8,4096,128]"}
    for model, shape in expected.items():
        for module in (model[0], copy.deepcopy(model)[0]):
            assert shape in kernel_shapes(lowered_for_tpu(ALL_ATTENTION_FUNCTIONS[NAME], 8, 4096, module=module))[0]
    assert (len(ALL_ATTENTION_FUNCTIONS), len(ALL_MASK_ATTENTION_FUNCTIONS)) == before


def test_the_name_is_not_one_that_transformers_takes_for_a_kernel_of_the_hub():
    assert "flash" not in NAME
    assert not set("/:|@") & set(NAME)


def test_inside_a_scanned_layer_gradients_equal_the_portable_attentions(kernel, monkeypatch):
    from functorch.compile import min_cut_rematerialization_partition
    from torch_xla.experimental import scan

    # monkeypatch: torch_xla/experimental/scan.py, torch_xla 2.9. Its backward under SPMD needs torchax to lay gradients
    # out as the parameters are, and numbers do not depend on layouts.
    monkeypatch.setattr(scan, "shard_as", lambda a, b: (a, b))
    layout, heads = LAYOUTS["batch over four, heads over two"]
    torch.manual_seed(0)
    width = heads * D
    hidden, weights, segments = torch.randn(B, S, width), torch.randn(2, width, width) * width**-0.5, make_segments()

    def layer(function, hidden, weight, segments):
        query = (hidden @ weight).view(B, S, heads, D).transpose(1, 2)
        out, _ = function(MODULE, query, query[:, :K], query[:, -K:], None, segment_ids=segments)
        return hidden + out.reshape(B, S, width)

    def scanned(carry, weight):
        hidden, segments = carry
        return (
            layer(Attention(layout), hidden, weight, segments.detach().to(torch.int32)),
            segments,
        ), None

    leaves = [hidden.requires_grad_(), weights.requires_grad_()]
    theirs = hidden
    for weight in weights:
        theirs = layer(Attention(), theirs, weight, segments)
    ours_leaves = [t.detach().to("xla").requires_grad_() for t in leaves]
    init = (ours_leaves[0], segments.float().to("xla"))
    (ours, _), _ = scan.scan(scanned, init, ours_leaves[1], partition_fn=min_cut_rematerialization_partition)
    grads = torch.autograd.grad(ours.square().sum(), ours_leaves)
    torch_xla.sync()
    expected = [theirs, *torch.autograd.grad(theirs.square().sum(), leaves)]
    assert worst([t.detach().cpu() for t in (ours, *grads)], [t.detach() for t in expected]) < 2e-6
