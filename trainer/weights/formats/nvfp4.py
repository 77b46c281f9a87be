"""NVFP4: pairs of 4-bit floats in a byte, with an FP8 scale for each 16 of a row, and a number for all of them.

ModelOpt multiplies the scales by that number (`weight`, `weight_scale`, `weight_scale_2`), compressed-tensors divides
them by it (`weight_packed`, `weight_scale`, `weight_global_scale`). The product of both scales is rounded to float32
before it meets the code, as both do it.
"""

import math
from functools import partial

import torch

from shardwright.files.arrays import Array, mapped, whole
from shardwright.weights.formats.encode import nvfp4
from shardwright.weights.formats.format import ANY, BYTES, Format, Parts, Settings, scaled, shape_error
from shardwright.weights.formats.mxfp4 import fp4

_GROUP = 16


def _nvfp4(codes: str, number: str) -> Format:
    def decode(parts: Parts, settings: Settings) -> Array:
        of_all = parts[number]
        if math.prod(of_all.shape) != 1 or not of_all.dtype.is_floating_point:
            raise shape_error(number.removeprefix("."), of_all, "one number")

        def both(scales: torch.Tensor) -> torch.Tensor:
            factor = whole(of_all).reshape(()).to(torch.float32)
            scales = scales.to(torch.float32)
            return scales / factor if number == ".weight_global_scale" else scales * factor

        return scaled(fp4(parts[codes]), mapped(parts[".weight_scale"], both, torch.float32), [(_GROUP,)])

    return Format(
        title="NVFP4",
        parts={codes: BYTES, ".weight_scale": {torch.float8_e4m3fn}, number: ANY},
        decode=decode,
        unread=(".weight_shape",),
        encode=partial(nvfp4, codes, number),
    )


MODELOPT = _nvfp4(".weight", ".weight_scale_2")
PACKED = _nvfp4(".weight_packed", ".weight_global_scale")
