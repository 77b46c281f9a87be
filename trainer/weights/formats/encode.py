"""Weights into the formats in which they are published: one weight in, the tensors that hold it out.

Each function is a format's ``encode``: of the weight's values, the config's quantization_config, and the tensors in
which the base holds the same weight (empty: there is none, and the format's usual dtypes are taken). On meta it
computes nothing and tells shapes and dtypes. A shape that the format can't hold raises ValueError with the reason.
"""

import json
from collections.abc import Sequence

import torch
from torch.nn import functional

from shardwright.files.arrays import whole
from shardwright.models.adapters.packings.packing import divided, largest
from shardwright.weights.formats.format import (
    Parts,
    Settings,
    block_shape,
    block_sizes,
    group_sizes,
    group_weights,
    with_dimensions,
)

# Halfway points between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of a 4-bit float (E2M1). A value that lies on one
# goes to the even code, so those below an even one are the float32 before.
_LARGEST_E2M1 = 6.0
_HALFWAY = [0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0]
_GROUP = 32  # weights with one scale, in MXFP4 always
_INT4 = 8  # codes are -8 to 7
_NV_GROUP = 16  # weights with one scale, in NVFP4
_LEAST = 2.0**-126  # of a scale: the least normal float32


def fp8_blocks(scale: str, values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """8-bit floats ``.weight`` [rows, columns], and ``scale`` [blocks of rows, blocks of columns]; the last may be cut.

    Which weights share a scale, the base's ``scale`` says: a block, all, a row or a group; its codes may be 8-bit
    integers. A group's largest magnitude becomes the largest code, as DeepSeek-V3's are made
    (https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py) and compressed-tensors' (quantization/utils,
    `calculate_qparams`). The scale is a power of two where the config or the base's dtype says so.
    """
    if values.dim() != 2:
        raise ValueError(f"it has {values.dim()} dimensions, and blocks are of rows and columns")
    block = _sharing(scale, values.shape, settings, like)
    dtype = like[".weight"].dtype if like else torch.float8_e4m3fn
    kept = like[scale].dtype if like else torch.float32
    integers = dtype == torch.int8
    largest_code = 127.5 if integers else torch.finfo(dtype).max
    values = values.to(torch.float32)
    scales = _scales(values, block, largest_code)
    if settings.get("scale_fmt") == "ue8m0" or kept.itemsize == 1:
        scales = _power_above(scales)
    stored = scales.to(kept) if kept.itemsize > 1 else _exponents(scales).view(kept)
    used = stored.to(torch.float32) if kept.itemsize > 1 else scales  # what a reader multiplies by
    codes = divided(values, used, block)
    codes = codes.round().clamp(-128, 127) if integers else codes.clamp(-largest_code, largest_code)
    return {".weight": codes.to(dtype), scale: stored.reshape(like.get(scale, stored).shape)}


def _sharing(scale: str, shape: Sequence[int], settings: Settings, like: Parts) -> tuple[int, ...]:
    """The rows and columns of the weights that share a scale."""
    if not like:
        return tuple(settings.get("weight_block_size") or (128, 128))
    groups = [(size,) for size in (*group_sizes(settings), _GROUP)]
    stated = [*block_sizes(settings), (128, 128), *groups]
    return block_shape(with_dimensions(like[scale], 2), shape, stated, others=True)


def int8_plain(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """8-bit integers ``.weight``, and ``.weight_scale``, as :func:`fp8_blocks`."""
    if more := [tail for tail in (".weight_zero_point", ".weight_g_idx") if tail in like]:
        raise ValueError(f"the base has {more[0]}, and codes without it are written")
    return fp8_blocks(".weight_scale", values, settings, like)


def nvfp4(codes: str, number: str, values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit floats ``codes`` [rows, columns / 2], 8-bit scales ``.weight_scale`` [rows, groups], the base's ``number``.

    That number stays, since an engine takes one for all of a module's projections: a group beyond what it holds is
    clipped. As compressed-tensors makes them (compressors/nvfp4, which divides by the number), and ModelOpt, which
    multiplies by it, ``.weight_scale_2`` (https://github.com/NVIDIA/Model-Optimizer, quantization/qtensor).
    """
    values, block = _in_groups(values, _NV_GROUP)
    kept = whole(like[number]).to(values.device)
    of_all = kept.reshape(()).to(torch.float32)
    local = largest(values, block, zeros=0.0) / _LARGEST_E2M1
    divides, most = number == ".weight_global_scale", torch.finfo(torch.float8_e4m3fn).max
    scales = local * of_all if divides else (local / of_all).clamp_min(2.0**-9)
    scales = scales.clamp_max(most).to(torch.float8_e4m3fn).to(torch.float32)
    # as each has it for a group of zeros
    scales = torch.where(scales > 0, scales, 0.125) if divides else torch.where(local > 0, scales, 1.0)
    packed = _pairs(_codes_e2m1(divided(values, scales / of_all if divides else scales * of_all, block)))
    return {
        codes: packed.view(like[codes].dtype),
        ".weight_scale": scales.to(torch.float8_e4m3fn),
        number: kept,
    }


def four_bit_table(state: str, values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """bitsandbytes' codes of 4 bits, each of the nearest number in the base's own table, and what goes with them.

    Blocks, table and offset are those of the base's ``state``; a block's largest value is packed once more where the
    base has it so (https://github.com/bitsandbytes-foundation/bitsandbytes, functional.py, `quantize_4bit`).
    """
    stated = json.loads(bytes(whole(like[state]).tolist()))
    if tuple(stated["shape"]) != tuple(values.shape):
        raise ValueError(f"its shape is {list(values.shape)}, and {stated['shape']} in the base's quant_state")
    if values.is_meta:
        return {tail: torch.empty(part.shape, dtype=part.dtype, device="meta") for tail, part in like.items()}
    flat, block = values.to(torch.float32).flatten(), (stated["blocksize"],)
    inside = functional.pad(divided(flat, largest(flat, block), block), (0, len(flat) % 2))  # a pair for the last one
    codes = _nearest(inside, whole(like[".quant_map"]))
    made = {"": (codes[0::2] << 4 | codes[1::2]).view(like[""].dtype).reshape(like[""].shape)}
    made[".absmax"] = largest(flat, block, zeros=0.0)
    if ".nested_absmax" in like:
        less, block = made[".absmax"] - stated["nested_offset"], (stated["nested_blocksize"],)
        made[".nested_absmax"] = outer = largest(less, block, zeros=0.0)
        inside = divided(less, outer.clamp_min(_LEAST), block)
        made[".absmax"] = _nearest(inside, whole(like[".nested_quant_map"]))
    return {tail: made[tail].to(part.dtype) if tail in made else whole(part).clone() for tail, part in like.items()}


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The place in ``table`` of the number that is nearest to each of ``values``, as bytes."""
    ordered, places = table.to(torch.float32).sort()
    return places.to(torch.uint8)[torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2, out_int32=True)]


def int8_rows(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """bitsandbytes' 8-bit integers ``.weight`` of a row over its largest value, ``.SCB`` (`int8_vectorwise_quant`)."""
    if values.dim() != 2:
        raise ValueError(f"it has {values.dim()} dimensions, where rows and columns are written")
    values = values.to(torch.float32)
    absmax = values.abs().amax(1)
    codes = (values * (127 / torch.where(absmax > 0, absmax, 1.0))[:, None]).round().to(torch.int8)
    beside = {tail: whole(part).to(values.device) for tail, part in like.items() if tail == ".weight_format"}
    return {".weight": codes, ".SCB": absmax.to(like[".SCB"].dtype), **beside}


def mxfp4_experts(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit floats of experts [experts, in, out]: ``_blocks`` [experts, out, in / 32, 16] and exponents, ``_scales``.

    As gpt-oss has them, and as its own tools make them (https://github.com/triton-lang/triton, triton_kernels,
    numerics_details/mxfp.py): the scale is the smallest power of two that clips nothing. The OCP microscaling formats
    say what the codes are (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
    """
    if values.dim() != 3:
        raise ValueError(f"its shape is {list(values.shape)}, where [experts, inputs, outputs]")
    # one by one: float32 of all of them would be several times the weight
    codes, scales = zip(*(_mxfp4(expert.T) for expert in values), strict=True)
    return {"_blocks": torch.stack(codes).unflatten(-1, (-1, _GROUP // 2)), "_scales": torch.stack(scales)}


def mxfp4_packed(
    main: str, scale: str, values: torch.Tensor, settings: Settings, like: Parts
) -> dict[str, torch.Tensor]:
    """4-bit floats of one weight: pairs ``main`` [rows, columns / 2] and exponents ``scale`` [rows, groups].

    The codes are those of :func:`mxfp4_experts`, the dtypes the base's, or bytes as compressed-tensors has them.
    """
    codes, scales = _mxfp4(values)
    return {main: codes.view(like.get(main, codes).dtype), scale: scales.view(like.get(scale, scales).dtype)}


def _mxfp4(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Pairs of codes [rows, columns / 2] of ``values`` [rows, columns], and their scales' bytes [rows, groups]."""
    values, block = _in_groups(values, _GROUP)
    scales = _power_above(_scales(values, block, _LARGEST_E2M1))
    return _pairs(_codes_e2m1(divided(values, scales, block))), _exponents(scales)


def int4_packed(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit integers, eight in an int32, and a scale for each group of a row, as compressed-tensors packs them.

    ``.weight_packed`` [rows, columns / 8] with code + 8 from the lowest bits up, ``.weight_scale`` [rows, groups] and
    ``.weight_shape`` (https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized). A group's scale
    is its largest magnitude / 7.5, as that package's symmetric observer has it.
    """
    values, block = _in_groups(values, _int4_group(settings))
    kept = like[".weight_scale"].dtype if like else torch.bfloat16
    numbers = like[".weight_shape"].dtype if like else torch.int64
    scales = _scales(values, block, _INT4 - 0.5).to(kept)
    codes = divided(values, scales.to(torch.float32), block).round().clamp(-_INT4, _INT4 - 1).to(torch.int32) + _INT4
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    # no two codes share a bit, so their sum is their union; the last one's highest bit is the sign
    packed = (codes.unflatten(1, (-1, 8)) << shifts).sum(-1, dtype=torch.int32)
    shape = torch.tensor(values.shape, dtype=numbers, device=values.device)
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_shape": shape}


def _int4_group(settings: Settings) -> int:
    """The columns with one scale; raises ValueError where the config says another layout than this one."""
    groups = [weights for weights in group_weights(settings) if weights]
    said = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "actorder": None}
    if len(groups) != 1:
        raise ValueError(f"{len(groups)} groups of weights in the config, where one is written")
    for name, wanted in said.items():
        if groups[0].get(name, wanted) != wanted:
            raise ValueError(f"{name} is {groups[0][name]!r} in the config, where {wanted!r} is written")
    size = int(groups[0]["group_size"])
    if size % 8:
        raise ValueError(f"group_size is {size} in the config, where a multiple of 8 is written")
    return size


def _in_groups(values: torch.Tensor, size: int) -> tuple[torch.Tensor, tuple[int, int]]:
    """``values`` [rows, columns] in float32, and the block of ``size`` columns with one scale; ValueError: no such."""
    if values.dim() != 2 or values.shape[1] % size:
        raise ValueError(f"its shape is {list(values.shape)}, where [rows, columns in groups of {size}]")
    return values.to(torch.float32).contiguous(), (1, size)


def _scales(values: torch.Tensor, block: tuple[int, ...], largest_code: float) -> torch.Tensor:
    """The scales with which each block's largest magnitude gets the largest code; 1 for a block of zeros."""
    return (largest(values, block, zeros=largest_code) / largest_code).clamp_min(_LEAST)


def _power_above(scales: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are no smaller."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))


def _exponents(powers: torch.Tensor) -> torch.Tensor:
    """Powers of two as bytes: their exponents + 127 (E8M0)."""
    return (torch.frexp(powers).exponent + 126).clamp(0, 254).to(torch.uint8)


def _codes_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit floats, as bytes."""
    edges = torch.tensor(_HALFWAY, device=numbers.device)
    return torch.bucketize(numbers.abs(), edges, out_int32=True).to(torch.uint8) | (numbers < 0).to(torch.uint8) << 3


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first in its low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4
