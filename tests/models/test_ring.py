"""`shardwright.models.attention.ring`: attention of rows split over devices, against the portable one of whole rows."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla
import torch_xla.distributed.spmd as xs

from shardwright.models.attention import splash
from shardwright.models.attention.attention_interface import Attention, mark_chunks
from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.attention.pieces import from_pieces, numbers, to_pieces
from shardwright.prove.trajectory import relative
from tests.support.kernels import interpreted

B, H, K, S, D, E = 2, 4, 2, 64, 16, 8
ORDER = (6, 7, 2, 3, 4, 5, 0, 1)


def make_inputs(length: int) -> list[torch.Tensor]:
    """Query, key, value, sinks, and the gradient of the output."""
    torch.manual_seed(0)
    shapes = [(B, H, length, D), (B, K, length, D), (B, K, length, E), (H,), (B, length, H, E)]
    return [torch.randn(shape) for shape in shapes]


def make_segments() -> torch.Tensor:
    """Documents whose ends are no piece's, then padding; row 1 has padding in front too."""
    segments = torch.ones(B, S, dtype=torch.long)
    segments[:, 11:], segments[:, 45:], segments[:, 60:], segments[1, :5] = 2, 3, 0, 0
    return segments


def layout_of(shards: int, order: tuple[int, ...] | None = None) -> KernelLayout:
    """Rows over ``shards`` of 8 devices, and heads over two of the others."""
    axes = (("data", 1 if shards > 2 else 2), ("tensor", 1 if shards == 8 else 2), ("sequence", shards))
    return KernelLayout(axes, ("data",), ("tensor",), order, "sequence")


def results(layout: KernelLayout | None, **case: Any) -> list[torch.Tensor]:
    """What :func:`lazy` gives, computed, on the CPU."""
    found = lazy(layout, **case)
    torch_xla.sync()
    return [t.detach().cpu() for t in found]


def lazy(
    layout: KernelLayout | None, segments=None, sinks=False, chunk=0, length=S, **options: Any
) -> list[torch.Tensor]:
    """The output and the gradients of query, key, value and, if they are used, sinks, in a row's own order."""
    *tensors, grad = [t.to("cpu" if layout is None else "xla").requires_grad_() for t in make_inputs(length)]
    given = list(tensors)
    if layout is not None:
        count = layout.sequence_shards
        names, sizes = zip(*layout.axes, strict=True)
        mesh = xs.Mesh(np.array(layout.order or range(8)), sizes, names)
        given[:3] = [to_pieces(t, count, 2) for t in given[:3]]
        for tensor in given[:3]:
            xs.mark_sharding(tensor, mesh, (layout.batch_axes, None, layout.sequence_axis, None))
        segments = None if segments is None else to_pieces(segments.to("xla"), count, 1)
    layer = SimpleNamespace(config=SimpleNamespace(attention_chunk_size=chunk, layer_types=["chunked_attention"]))
    layer.layer_idx = 0
    if chunk:
        mark_chunks([layer])
    attention = Attention() if layout is None else Attention(layout)
    out, _ = attention(
        layer if chunk else SimpleNamespace(),
        *given[:3],
        None,
        segment_ids=segments,
        s_aux=given[3] if sinks else None,
        **options,
    )
    out = out if layout is None else from_pieces(out, layout.sequence_shards, 1)
    return [out, *torch.autograd.grad(out, tensors[: 4 if sinks else 3], grad)]


def worst(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    pairs = zip(ours, theirs, strict=True)
    return max(relative(a, b) for a, b in pairs)


CASES: dict[str, dict[str, Any]] = {
    "causal": {},
    "a window, a scale": {"sliding_window": 13, "scaling": 0.3},
    "chunks that are no pieces": {"chunk": 10},
    "packed and padded, soft cap": {"segments": make_segments(), "softcap": 2.0},
    "packed and padded, window and sinks": {"segments": make_segments(), "sliding_window": 20, "sinks": True},
    "packed and padded, chunks": {"segments": make_segments(), "chunk": 24},
    "pieces of whole blocks": {"length": 512},
}


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_each_device_has_two_pieces_that_are_equally_much_work(devices):
    row = torch.arange(8 * devices)
    order = to_pieces(row, devices, 0)
    assert from_pieces(order, devices, 0).equal(row)
    assert order[:: len(row) // (2 * devices)].equal(numbers(devices, row.device) * (len(row) // (2 * devices)))
    work = order.view(devices, -1).sum(1)  # a token sees as many others as lie before it
    assert work.eq(work[0]).all()


@pytest.mark.parametrize(
    ("case", "layout"),
    [
        ("causal", layout_of(2)),
        ("a window, a scale", layout_of(8)),
        ("chunks that are no pieces", layout_of(4)),
        ("packed and padded, soft cap", layout_of(4, ORDER)),
        ("packed and padded, window and sinks", layout_of(2)),
        ("packed and padded, chunks", layout_of(8)),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.sequence_shards} devices",
)
def test_output_and_gradients_equal_those_of_whole_rows(case, layout):
    ours = results(layout, **CASES[case])
    assert worst(ours, results(None, **CASES[case])) < 2e-6
    if "segments" in CASES[case]:
        assert ours[0][make_segments() == 0].eq(0).all()


@pytest.mark.parametrize("case", ["pieces of whole blocks", "packed and padded, window and sinks"])
def test_the_kernel_of_a_tpu_interpreted_equals_whole_rows(case, monkeypatch):
    monkeypatch.setattr(splash, "BLOCK", 256)  # of float32 it is halved
    with interpreted():
        assert worst(results(layout_of(2), **CASES[case]), results(None, **CASES[case])) < 2e-6


def test_keys_go_from_device_to_device_and_no_scores_of_a_whole_row_exist():
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    hlo = torch_xla._XLAC._get_xla_tensors_hlo(lazy(layout_of(4), segments=make_segments(), sinks=True))
    found = set(re.findall(r"(collective-permute|all-gather|all-reduce|all-to-all|reduce-scatter)\(", hlo))
    assert found == {"collective-permute"}
    assert not re.findall(rf"\w+\[[\d,]*,(?:{S}|{S // 4}|{S // 8}),{S}\]", hlo)
