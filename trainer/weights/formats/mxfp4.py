"""MXFP4: pairs of 4-bit floats (E2M1) in a byte, with a power of two (E8M0) for each 32 of a row.

The Open Compute Project's microscaling formats, https://arxiv.org/abs/2310.10537. gpt-oss holds an expert's columns as
rows of blocks, `X_blocks` [experts, out, blocks, 16] and `X_scales`; compressed-tensors has `weight_packed` and
`weight_scale`, DeepSeek-V4 `weight` and `scale`, in the order of the plain weight.
"""

from collections.abc import Mapping
from functools import partial

import torch

from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.weights.formats.encode import mxfp4_experts, mxfp4_packed
from shardwright.weights.formats.format import (
    Encode,
    Format,
    Parts,
    Settings,
    looked_up,
    mapped,
    powers_of_two,
    scaled,
    shape_error,
    transposed,
    unpacked,
)

VALUES = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])
BYTES = {torch.uint8, torch.int8}
_EXPONENTS = {torch.uint8, torch.float8_e8m0fnu}
_GROUP = 32
_BYTES = _GROUP // 2


def fp4(packed: Array) -> LazyArray:
    """Numbers [.., columns] of pairs of codes [.., columns / 2]; the first of a pair is in the lower bits."""
    return mapped(unpacked(packed, 4, -1), lambda codes: looked_up(VALUES, codes), torch.float32)


def grouped(packed: Array, scales: Array, group: int) -> LazyArray:
    """Pairs of codes [.., columns / 2] times a scale for each ``group`` of columns."""
    *rows, columns = (*packed.shape[:-1], packed.shape[-1] * 2)
    if tuple(scales.shape) != (*rows, -(-columns // group)):
        wanted = f"{[*rows, -(-columns // group)]}, one for each {group} of {[*rows, columns]}"
        raise shape_error("its scale", scales, wanted)
    return scaled(fp4(packed), scales, (*[1] * len(rows), group))


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


def _gpt_oss(parts: Parts, settings: Settings) -> Array:
    return transposed(grouped(_rows(parts["_blocks"]), powers_of_two(parts["_scales"]), _GROUP))


def _mxfp4(
    main: str, scale: str, plain: str = ".weight", unread: tuple[str, ...] = (), encode: Encode | None = None
) -> Format:
    return Format(
        title="MXFP4",
        main=main,
        scales=(scale,),
        holds=lambda parts: parts[main].dtype in BYTES and parts[scale].dtype in _EXPONENTS,
        decode=lambda parts, settings: grouped(parts[main], powers_of_two(parts[scale]), _GROUP),
        plain=plain,
        unread=unread,
        encode=encode or partial(_under_names, main, scale),
    )


def _under_names(
    main: str, scale: str, values: torch.Tensor, settings: Settings, like: Parts
) -> Mapping[str, torch.Tensor]:
    """The tensors of `mxfp4_packed` under other names, in the base's dtypes."""
    codes, scales = mxfp4_packed(values, settings, like).values()
    return {main: codes.view(like[main].dtype), scale: scales.view(like[scale].dtype)}


GPT_OSS = Format(
    title="MXFP4",
    main="_blocks",
    scales=("_scales",),
    holds=lambda parts: {part.dtype for part in parts.values()} == {torch.uint8},
    decode=_gpt_oss,
    plain="",
    encode=mxfp4_experts,
)
# transformers 5.23 saves a gpt-oss that it has dequantized under the quantized names, and reads no such folder itself
GPT_OSS_SAVED = Format(
    title="",
    main="_blocks",
    scales=(),
    holds=lambda parts: parts["_blocks"].dtype.is_floating_point,
    decode=lambda parts, settings: parts["_blocks"],
    plain="",
)
# compressed-tensors
PACKED = _mxfp4(".weight_packed", ".weight_scale", unread=(".weight_shape",), encode=mxfp4_packed)
MODELOPT = _mxfp4(".weight", ".weight_scale")
# DeepSeek-V4's names, and those that transformers saves it under
DEEPSEEK = [
    _mxfp4(".weight", ".scale"),
    _mxfp4(".weight", ".weight_scale_inv"),
    *[_mxfp4(name, f"{name}_scale_inv", name) for name in (".gate_up_proj", ".down_proj")],
]
