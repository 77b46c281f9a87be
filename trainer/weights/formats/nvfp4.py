"""NVFP4: pairs of 4-bit floats in a byte, with an FP8 scale for each 16 of a row, and a number for all of them.

ModelOpt multiplies the scales by that number (`weight`, `weight_scale`, `weight_scale_2`), compressed-tensors divides
them by it (`weight_packed`, `weight_scale`, `weight_global_scale`). The product of both scales is rounded to float32
before it meets the code, as both do it.
"""

import math
from functools import partial

import torch

from shardwright.files.arrays import Array, whole
from shardwright.weights.formats.encode import nvfp4
from shardwright.weights.formats.format import Format, Parts, Settings, mapped, shape_error
from shardwright.weights.formats.mxfp4 import BYTES, grouped

_GROUP = 16


def _number(name: str, array: Array) -> Array:
    if math.prod(array.shape) != 1 or not array.dtype.is_floating_point:
        raise shape_error(name, array, "one number")
    return array


def _decode(parts: Parts, codes: str, number: str, *, divides: bool) -> Array:
    of_all = _number(number.removeprefix("."), parts[number])

    def both(scales: torch.Tensor) -> torch.Tensor:
        factor = whole(of_all).reshape(()).to(torch.float32)
        return scales.to(torch.float32) / factor if divides else scales.to(torch.float32) * factor

    return grouped(parts[codes], mapped(parts[".weight_scale"], both, torch.float32), _GROUP)


def _nvfp4(codes: str, number: str, *, divides: bool, unread: tuple[str, ...] = ()) -> Format:
    def decode(parts: Parts, settings: Settings) -> Array:
        return _decode(parts, codes, number, divides=divides)

    return Format(
        title="NVFP4",
        main=codes,
        scales=(".weight_scale", number),
        holds=lambda parts: parts[codes].dtype in BYTES and parts[".weight_scale"].dtype == torch.float8_e4m3fn,
        decode=decode,
        unread=unread,
        encode=partial(nvfp4, codes, number),
    )


MODELOPT = _nvfp4(".weight", ".weight_scale_2", divides=False)
PACKED = _nvfp4(".weight_packed", ".weight_global_scale", divides=True, unread=(".weight_shape",))
