"""FP8: a weight in 8-bit floats, with one scale for all of it, for each row, or for each block of rows and columns.

Blocks: `weight_scale_inv` of DeepSeek-V3 and all who follow it (https://github.com/deepseek-ai/DeepSeek-V3, inference/
kernel.py, `weight_dequant`); despite the name a weight is its code times this scale. One scale, or one a row:
`weight_scale` of compressed-tensors, ModelOpt and FBGEMM. Activations' scales serve inference alone.
"""

from functools import partial

import torch

from shardwright.files.arrays import Array
from shardwright.weights.formats.encode import fp8_blocks
from shardwright.weights.formats.format import FLOATS, Format, Settings, block_sizes, group_sizes, powers_of_two, scaled

CODES = {torch.float8_e4m3fn, torch.float8_e5m2}
_BLOCK = (128, 128)  # of all who publish blocks; a config may say another
_MX = 32  # the columns that share a scale which is a power of two (OCP's microscaling formats)


def _decode(codes: Array, scales: Array, settings: Settings) -> Array:
    blocks = [block for block in block_sizes(settings) if len(block) == 2] or [_BLOCK]
    # where the config says that all weights have blocks, one scale for all or for a row is a scale cut off
    others = not settings.get("weight_block_size")
    groups = [(size,) for size in (*group_sizes(settings), _MX)] if others else []
    return scaled(codes, powers_of_two(scales), [*blocks, *groups], others=others)


def _fp8(scale: str, title: str = "FP8 in blocks", main: str = ".weight") -> Format:
    return Format(
        title=title,
        parts={main: CODES, scale: FLOATS | {torch.uint8}},
        decode=lambda parts, settings: _decode(parts[main], parts[scale], settings),
        plain=main,
        unread=(f"{main}_activation_scale", ".activation_scale", ".input_scale_ub"),
        encode=partial(fp8_blocks, scale) if main == ".weight" else None,
    )


BLOCKS = _fp8(".weight_scale_inv")
ROWS = _fp8(".weight_scale", "FP8")
SCALE = _fp8(".scale")  # DeepSeek-V4's name of the same
# transformers' own saves of fused experts
FUSED = [_fp8(f"{name}_scale_inv", main=name) for name in (".gate_up_proj", ".down_proj")]
