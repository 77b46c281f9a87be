"""FP8: a weight in 8-bit floats, with one scale for all of it, for each row, or for each block of rows and columns.

Blocks: `weight_scale_inv` of DeepSeek-V3 and all who follow it (https://github.com/deepseek-ai/DeepSeek-V3, inference/
kernel.py, `weight_dequant`); despite the name a weight is its code times this scale. One scale, or one a row:
`weight_scale` of compressed-tensors, ModelOpt and FBGEMM. Activations' scales serve inference alone.
"""

from functools import partial

import torch

from shardwright.files.arrays import Array
from shardwright.weights.formats.encode import fp8_blocks
from shardwright.weights.formats.format import (
    Encode,
    Format,
    Parts,
    Settings,
    block_shape,
    block_sizes,
    group_sizes,
    like,
    powers_of_two,
    scaled,
    shape_error,
)

CODES = {torch.float8_e4m3fn, torch.float8_e5m2}
_BLOCK = (128, 128)  # of all who publish blocks; a config may say another
_MX = 32  # the columns that share a scale which is a power of two (OCP's microscaling formats)


def _decode(codes: Array, scales: Array, settings: Settings) -> Array:
    stated = [block for block in block_sizes(settings) if len(block) == 2] or [_BLOCK]
    groups = [(size,) for size in (*group_sizes(settings), _MX)]
    scales = like(powers_of_two(scales), len(codes.shape))
    blocks = block_shape(scales, codes.shape, [*stated, *groups])
    # where the config says that all weights have blocks, one scale for all or for a row is a scale cut off
    if blocks is None or (settings.get("weight_block_size") and blocks[-2:] not in [b[-len(blocks) :] for b in stated]):
        grid = [-(-size // part) for size, part in zip(codes.shape[-2:], stated[0][-len(codes.shape) :], strict=True)]
        wanted = f"{[*codes.shape[:-2], *grid]}, for {list(codes.shape)} in blocks of {list(stated[0])}"
        raise shape_error("its scale", scales, wanted)
    return scaled(codes, scales, blocks)


def _fp8(scale: str, title: str, main: str = ".weight", plain: str = ".weight", encode: Encode | None = None) -> Format:
    def holds(parts: Parts) -> bool:
        number = parts[scale].dtype.is_floating_point or parts[scale].dtype == torch.uint8
        return parts[main].dtype in CODES and number

    return Format(
        title=title,
        main=main,
        scales=(scale,),
        holds=holds,
        decode=lambda parts, settings: _decode(parts[main], parts[scale], settings),
        plain=plain,
        unread=(f"{main}_activation_scale", ".activation_scale", ".input_scale_ub"),
        encode=encode,
    )


BLOCKS = _fp8(".weight_scale_inv", "FP8 in blocks", encode=partial(fp8_blocks, ".weight_scale_inv"))
ROWS = _fp8(".weight_scale", "FP8", encode=partial(fp8_blocks, ".weight_scale"))
SCALE = _fp8(".scale", "FP8 in blocks", encode=partial(fp8_blocks, ".scale"))  # DeepSeek-V4's name of the same
FUSED = [
    _fp8(f"{name}_scale_inv", "FP8 in blocks", name, name) for name in (".gate_up_proj", ".down_proj")
]  # transformers' own saves of fused experts
