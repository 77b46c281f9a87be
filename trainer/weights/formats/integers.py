"""INT4 and INT8 of compressed-tensors: whole numbers, with one scale for all, for each row or for a group of columns.

https://github.com/vllm-project/compressed-tensors, pack_quantized and naive_quantized: a code less its zero, times its
scale. `weight_packed` holds codes of 4 or 8 bits in int32 words along a row, and zeros along a column, both plus half
of their range; `weight` in int8 has them one by one.
"""

import torch

from shardwright.files.arrays import Array, whole
from shardwright.weights.formats.encode import int4_packed, int8_plain
from shardwright.weights.formats.format import (
    ANY,
    WIDE_FLOATS,
    Format,
    Parts,
    Settings,
    group_sizes,
    picked,
    scaled,
    shape_error,
    unpacked,
    with_dimensions,
)

_WORD = 32  # bits
_BITS = (4, 8)
_OPTIONAL = (".weight_zero_point", ".weight_g_idx")


def _values(codes: Array, parts: Parts, zeros: Array | int, settings: Settings) -> Array:
    scales = with_dimensions(parts[".weight_scale"], len(codes.shape))
    size, groups = codes.shape[-1], scales.shape[-1]
    stated = group_sizes(settings) or [-(-size // groups)]
    if ".weight_g_idx" in parts and groups > 1:
        index = whole(parts[".weight_g_idx"])
        if tuple(index.shape) != (size,):
            raise shape_error("weight_g_idx", parts[".weight_g_idx"], f"[{size}]")
        if not bool((index == -1).any()):  # else the columns are in their own order
            scales = picked(scales, index, -1)
            zeros = zeros if isinstance(zeros, int) else picked(zeros, index, -1)
    return scaled(codes, scales, [(group,) for group in stated], zeros, others=True)


def _shape(parts: Parts, settings: Settings) -> tuple[int, ...]:
    """The weight's shape; ``weight_shape`` is read only where full groups do not fill full words.

    A model has one for each of tens of thousands of projections, each in another place of its files.
    """
    packed, groups = parts[".weight_packed"], parts[".weight_scale"].shape[-1]
    for size in group_sizes(settings):
        if groups > 1 and packed.shape[-1] * _WORD in [bits * groups * size for bits in _BITS]:
            return (*packed.shape[:-1], groups * size)
    return tuple(whole(parts[".weight_shape"]).tolist())


def _decode_packed(parts: Parts, settings: Settings) -> Array:
    packed, shape = parts[".weight_packed"], _shape(parts, settings)
    bits = [n for n in _BITS if tuple(packed.shape) == (*shape[:-1], -(-shape[-1] * n // _WORD))]
    if not bits:
        raise shape_error("weight_packed", packed, f"that of {list(shape)} in codes of {_BITS[0]} or {_BITS[1]} bits")
    codes, zeros = unpacked(packed, bits[0], -1, shape[-1]), 2 ** (bits[0] - 1)
    if ".weight_zero_point" not in parts:
        return _values(codes, parts, zeros, settings)
    held = parts[".weight_zero_point"]
    if held.shape[-2] != -(-shape[-2] * bits[0] // _WORD):
        raise shape_error("weight_zero_point", held, f"that of {shape[-2]} rows in codes of {bits[0]} bits")
    return _values(codes, parts, unpacked(held, bits[0], -2, shape[-2]), settings)


PACKED = Format(
    title="INT4 or INT8, packed",
    parts={".weight_packed": {torch.int32}, ".weight_scale": WIDE_FLOATS, ".weight_shape": ANY},
    decode=_decode_packed,
    optional=_OPTIONAL,
    encode=int4_packed,
)
PLAIN = Format(
    title="INT8",
    parts={".weight": {torch.int8}, ".weight_scale": WIDE_FLOATS},
    decode=lambda parts, settings: _values(parts[".weight"], parts, parts.get(".weight_zero_point", 0), settings),
    optional=_OPTIONAL,
    encode=int8_plain,
)
