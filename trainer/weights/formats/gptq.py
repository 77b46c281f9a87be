"""GPTQ and AWQ: codes of few bits packed in int32 words, with a scale and a zero for a group of inputs and an output.

A weight is (code - zero) × scale, stored transposed, [in, out]. GPTQ (https://arxiv.org/abs/2210.17323, in the layout
of AutoGPTQ) packs the codes along the inputs, names each input's group (`g_idx`), and stores a zero less one, except in
its second format. AWQ (https://arxiv.org/abs/2306.00978, GEMM layout) packs them along the outputs, in an order of its
own, in groups of neighbours.
"""

import torch

from shardwright.files.arrays import Array, mapped, whole
from shardwright.weights.formats.format import (
    FLOATS,
    Format,
    Parts,
    Settings,
    picked,
    scaled,
    shape_error,
    unpacked,
)

_WORD = 32  # bits
_BITS = (2, 3, 4, 8)
_AWQ_BITS = 4
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the places in a word of its eight codes: those of 0 2 4 6 1 3 5 7
# the config's name of a layout of GPTQ -> what is added to a stored zero
_ADDED = {"gptq": 1, "gptq_v2": 0, "auto_round:auto_gptq": 1}
_PARTS = {".qweight": {torch.int32}, ".qzeros": {torch.int32}, ".scales": FLOATS}
_CALIBRATED = (
    "its codes are chosen by what the model computes of sample texts, and trained weights say nothing of these"
)


def _is_awq(parts: Parts) -> bool:
    """Whether the words lie along the outputs."""
    return parts[".qweight"].shape[-1] * (_WORD // _AWQ_BITS) == parts[".scales"].shape[-1]


def _check(parts: Parts, bits: int) -> None:
    groups, outputs = parts[".scales"].shape
    if tuple(parts[".qzeros"].shape) != (groups, outputs * bits // _WORD):
        wanted = f"[{groups}, {outputs * bits // _WORD}], for scales [{groups}, {outputs}] and {bits} bits,"
        raise shape_error("qzeros", parts[".qzeros"], wanted)


def _in_groups(codes: Array, parts: Parts, zeros: Array, index: torch.Tensor | None, stated: int | None) -> Array:
    """The values of ``codes`` [in, out]; ``index``: the group of each input."""
    scales = parts[".scales"]
    size = stated if stated and stated > 0 else -(-codes.shape[0] // scales.shape[0])
    if index is not None:
        scales, zeros, size = picked(scales, index, 0), picked(zeros, index, 0), 1
    return scaled(codes, scales, [(size, 1)], zeros)


def _gptq(parts: Parts, settings: Settings) -> Array:
    layout = settings.get("checkpoint_format") or settings.get("packing_format") or "gptq"
    if layout not in _ADDED:
        raise ValueError(f"its layout is {layout!r}, where {', '.join(_ADDED)} are read")
    codes, zeros, outputs = parts[".qweight"], parts[".qzeros"], parts[".scales"].shape[-1]
    bits = zeros.shape[-1] * _WORD // max(1, outputs)
    if bits not in _BITS:
        raise shape_error("qzeros", zeros, f"that of {outputs} outputs in codes of {', '.join(map(str, _BITS))} bits")
    _check(parts, bits)
    index = whole(parts[".g_idx"]) if ".g_idx" in parts else None
    inputs = codes.shape[0] * _WORD // bits
    if index is not None and tuple(index.shape) != (inputs,):
        raise shape_error("g_idx", parts[".g_idx"], f"[{inputs}], for qweight {list(codes.shape)} and {bits} bits,")
    added = _ADDED[layout]
    zeros = mapped(unpacked(zeros, bits, 1), lambda stored: stored.to(torch.int16) + added, torch.int16)
    return _in_groups(unpacked(codes, bits, 0), parts, zeros, index, settings.get("group_size"))


def _awq(parts: Parts, settings: Settings) -> Array:
    _check(parts, _AWQ_BITS)
    codes, zeros = (unpacked(parts[tail], _AWQ_BITS, 1, order=_AWQ_ORDER) for tail in (".qweight", ".qzeros"))
    return _in_groups(codes, parts, zeros, None, settings.get("group_size"))


GPTQ = Format(
    title="GPTQ",
    parts=_PARTS,
    fits=lambda parts: len(parts[".qweight"].shape) == 2 and not _is_awq(parts),
    decode=_gptq,
    turned=True,
    optional=(".g_idx",),
    unwritten=_CALIBRATED,
)
AWQ = Format(
    title="AWQ",
    parts=_PARTS,
    fits=lambda parts: len(parts[".qweight"].shape) == 2 and _is_awq(parts),
    decode=_awq,
    turned=True,
    unwritten=_CALIBRATED,
)
