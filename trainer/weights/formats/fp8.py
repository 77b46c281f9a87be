"""FP8: a weight in 8-bit floats, with one scale for all of it, for each row, or for each block of rows and columns.

Blocks: `weight_scale_inv` of DeepSeek-V3 and all who follow it (https://github.com/deepseek-ai/DeepSeek-V3, inference/
kernel.py, `weight_dequant`); despite the name a weight is its code times this scale. One scale, or one a row:
`weight_scale` of compressed-tensors, ModelOpt and FBGEMM. Activations' scales serve inference alone.
"""

import math
from collections.abc import Sequence

import torch

from shardwright.files.arrays import Array, LazyArray, Slices, whole
from shardwright.weights.formats.format import Format, Settings, scaled, shape_error

_CODES = {torch.float8_e4m3fn, torch.float8_e5m2}
_UNREAD = tuple(f".{name}" for name in ("activation_scale", "input_scale", "input_scale_ub", "k_scale", "v_scale"))
_BLOCK = (128, 128)  # of all who publish blocks; a config may say another


def numbers(scales: Array) -> Array:
    """``scales`` as numbers: a byte is the exponent of a power of two (E8M0), under both of its dtypes."""
    if scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
        return scales

    def read(where: Slices) -> torch.Tensor:
        return (scales[where].view(torch.uint8).to(torch.float32) - 127).exp2()

    return LazyArray(tuple(scales.shape), torch.float32, read)


def _block_size(settings: Settings) -> tuple[Sequence[int], bool]:
    """Rows and columns of a block, and whether the config says that all weights have such blocks."""
    if settings.get("weight_block_size"):
        return tuple(settings["weight_block_size"]), True
    groups = (group.get("weights") or {} for group in (settings.get("config_groups") or {}).values())
    stated = [group["block_structure"] for group in groups if group.get("block_structure")]
    return (tuple(stated[0]) if stated and len(stated[0]) == 2 else _BLOCK), False


def _like(scales: Array, codes: Array) -> Array:
    """``scales`` with a dimension for each of ``codes``; one that has fewer is small, and read whole."""
    lacking = len(codes.shape) - len(scales.shape)
    if lacking == 0:
        return scales
    if lacking < 0:
        raise shape_error("its scale", scales, f"at most {len(codes.shape)} dimensions")
    shape = (*scales.shape, *[1] * lacking) if math.prod(scales.shape) > 1 else (1,) * len(codes.shape)
    return LazyArray(shape, scales.dtype, lambda where: whole(scales).reshape(shape)[where])


def _decode(codes: Array, scales: Array, settings: Settings) -> Array:
    scales = _like(numbers(scales), codes)
    (rows, columns), always = _block_size(settings)
    stated = (*[1] * (len(codes.shape) - 2), rows, columns)[-len(codes.shape) :]
    in_blocks = tuple(-(-size // block) for size, block in zip(codes.shape, stated, strict=True))
    if tuple(scales.shape) == in_blocks:
        return scaled(codes, scales, stated)
    pairs = list(zip(scales.shape, codes.shape, strict=True))
    if always or any(count not in (1, size) for count, size in pairs):
        wanted = f"{list(in_blocks)}, for {list(codes.shape)} in blocks of {list(stated)}"
        raise shape_error("its scale", scales, wanted)
    return scaled(codes, scales, tuple(size if count == 1 else 1 for count, size in pairs))


def _fp8(scale: str, title: str, main: str = ".weight", plain: str = ".weight") -> Format:
    return Format(
        title=title,
        main=main,
        scales=(scale,),
        holds=lambda parts: parts[main].dtype in _CODES,
        decode=lambda parts, settings: _decode(parts[main], parts[scale], settings),
        plain=plain,
        unread=_UNREAD,
    )


BLOCKS = _fp8(".weight_scale_inv", "FP8 in blocks")
ROWS = _fp8(".weight_scale", "FP8")
SCALE = _fp8(".scale", "FP8 in blocks")  # DeepSeek-V4's name of the same
FUSED = [
    _fp8(f"{name}_scale_inv", "FP8 in blocks", name, name) for name in (".gate_up_proj", ".down_proj")
]  # transformers' own saves of fused experts
