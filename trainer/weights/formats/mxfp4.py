"""MXFP4: pairs of 4-bit floats (E2M1) in a byte, with a power of two (E8M0) for each 32 of a row.

The Open Compute Project's microscaling formats, https://arxiv.org/abs/2310.10537. gpt-oss holds an expert's columns as
rows of blocks, `X_blocks` [experts, out, blocks, 16] and `X_scales`; compressed-tensors has `weight_packed` and
`weight_scale`, DeepSeek-V4 `weight` and `scale`, in the order of the plain weight.
"""

from functools import partial

import torch

from shardwright.files.arrays import Array, LazyArray, Slices, mapped
from shardwright.weights.formats.encode import mxfp4_experts, mxfp4_packed
from shardwright.weights.formats.format import (
    BYTES,
    EXPONENTS,
    FLOATS,
    Format,
    looked_up,
    powers_of_two,
    scaled,
    shape_error,
    unpacked,
)

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
_GROUP = 32
_BYTES = _GROUP // 2


def fp4(packed: Array) -> LazyArray:
    """Numbers [.., columns] of pairs of codes [.., columns / 2]; the first of a pair is in the lower bits."""
    return mapped(unpacked(packed, 4, -1), lambda codes: looked_up(VALUES, codes), torch.float32)


def _decode(codes: Array, exponents: Array) -> LazyArray:
    return scaled(fp4(codes), powers_of_two(exponents), [(_GROUP,)])


def _rows(blocks: Array) -> LazyArray:
    """Blocks [.., n, 16] as rows [.., n × 16]."""
    *front, count, size = blocks.shape
    if size != _BYTES:
        raise shape_error("its blocks", blocks, f"[.., {_BYTES}], {_GROUP} codes")

    def read(where: Slices) -> torch.Tensor:
        first, last = where[-1].start // size, -(-where[-1].stop // size)
        rows = blocks[(*where[:-1], slice(first, last), slice(0, size))].flatten(-2)
        return rows.narrow(-1, where[-1].start - first * size, where[-1].stop - where[-1].start)

    return LazyArray((*front, count * size), blocks.dtype, read)


def _mxfp4(main: str, scale: str, plain: str = ".weight") -> Format:
    return Format(
        title="MXFP4",
        parts={main: BYTES, scale: EXPONENTS},
        decode=lambda parts, settings: _decode(parts[main], parts[scale]),
        plain=plain,
        unread=(".weight_shape",),
        encode=partial(mxfp4_packed, main, scale),
    )


GPT_OSS = Format(
    title="MXFP4",
    parts={"_blocks": {torch.uint8}, "_scales": {torch.uint8}},
    decode=lambda parts, settings: _decode(_rows(parts["_blocks"]), parts["_scales"]),
    plain="",
    turned=True,
    encode=mxfp4_experts,
)
# transformers 5.23 saves a gpt-oss that it has dequantized under the quantized names, and reads no such folder itself
GPT_OSS_SAVED = Format(
    title="",
    parts={"_blocks": FLOATS},
    decode=lambda parts, settings: parts["_blocks"],
    plain="",
)
PACKED = _mxfp4(".weight_packed", ".weight_scale")  # compressed-tensors
MODELOPT = _mxfp4(".weight", ".weight_scale")
# DeepSeek-V4's names, and those that transformers saves it under
DEEPSEEK = [
    _mxfp4(".weight", ".scale"),
    _mxfp4(".weight", ".weight_scale_inv"),
    *[_mxfp4(name, f"{name}_scale_inv", name) for name in (".gate_up_proj", ".down_proj")],
]
