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
from shardwright.weights.formats.format import Parts, Settings, block_shape, block_sizes, group_sizes
from shardwright.weights.formats.format import like as with_dimensions

# Halfway points between the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6 of a 4-bit float (E2M1). A value that lies on one
# goes to the even code, so those below an even one are the float32 before.
_LARGEST_E2M1 = 6.0
_HALFWAY = [0.25, 0.75 - 2**-24, 1.25, 1.75 - 2**-23, 2.5, 3.5 - 2**-22, 5.0]
_GROUP = 32  # weights with one scale, in MXFP4 always
_INT4 = 8  # codes are -8 to 7
_NV_GROUP = 16  # weights with one scale, in NVFP4


def fp8_blocks(scale: str, values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """8-bit floats ``.weight`` [rows, columns], and ``scale`` [blocks of rows, blocks of columns]; the last may be cut.

    Which weights share a scale, the base's ``scale`` says where it is named ``.weight_scale``: all, a row or a group;
    its codes may be 8-bit integers then. A group's largest magnitude becomes the largest code, as DeepSeek-V3's are
    made (https://github.com/deepseek-ai/DeepSeek-V3, inference/kernel.py) and compressed-tensors' (quantization/utils,
    `calculate_qparams`). The scale is a power of two where the config or the base's dtype says so.
    """
    if values.dim() != 2:
        raise ValueError(f"it has {values.dim()} dimensions, and blocks are of rows and columns")
    rows, columns = _sharing(scale, values.shape, settings, like)
    dtype = like[".weight"].dtype if like else torch.float8_e4m3fn
    kept = like[scale].dtype if like else torch.float32
    integers = dtype == torch.int8
    largest_code = 127.5 if integers else torch.finfo(dtype).max
    height, width = values.shape
    padded = functional.pad(values.to(torch.float32), (0, -width % columns, 0, -height % rows))
    blocks = padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)
    scales = blocks.abs().amax((1, 3)) / largest_code
    scales = torch.where(scales > 0, scales, torch.ones_like(scales)).clamp_min(2.0**-126)
    if settings.get("scale_fmt") == "ue8m0" or kept in (torch.uint8, torch.float8_e8m0fnu):
        scales = _power_above(scales)
    stored = scales if kept.itemsize > 1 else _exponents(scales)
    stored = stored.to(kept) if kept.itemsize > 1 else stored.view(kept)
    used = stored.to(torch.float32) if kept.itemsize > 1 else scales  # what a reader multiplies by
    codes = blocks / used[:, None, :, None]
    codes = (codes.round().clamp(-128, 127) if integers else codes.clamp(-largest_code, largest_code)).to(dtype)
    shape = like[scale].shape if like and scale == ".weight_scale" else stored.shape
    return {".weight": codes.reshape(padded.shape)[:height, :width].contiguous(), scale: stored.reshape(shape)}


def _sharing(scale: str, shape: Sequence[int], settings: Settings, like: Parts) -> tuple[int, ...]:
    """The rows and columns of the weights that share a scale."""
    if scale != ".weight_scale" or not like:
        return tuple(settings.get("weight_block_size") or (128, 128))
    groups = [(size,) for size in (*group_sizes(settings), _GROUP)]
    found = block_shape(with_dimensions(like[scale], 2), shape, [*block_sizes(settings), (128, 128), *groups])
    if found is None:
        raise ValueError(f"its scale has shape {list(like[scale].shape)}, for {list(shape)}")
    return tuple(max(1, size) for size in found)


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
    if values.dim() != 2 or values.shape[1] % _NV_GROUP:
        raise ValueError(f"its shape is {list(values.shape)}, where [rows, columns in groups of {_NV_GROUP}]")
    rows, columns = values.shape
    if values.is_meta:
        packed = values.new_empty(rows, columns // 2, dtype=like[codes].dtype)
        scales = values.new_empty(rows, columns // _NV_GROUP, dtype=torch.float8_e4m3fn)
        return {codes: packed, ".weight_scale": scales, number: whole(like[number]).to("meta")}
    kept = whole(like[number])
    of_all = kept.reshape(()).to(torch.float32)
    groups = values.to(torch.float32).reshape(rows, -1, _NV_GROUP)
    local = groups.abs().amax(-1) / _LARGEST_E2M1
    divides, most = number == ".weight_global_scale", torch.finfo(torch.float8_e4m3fn).max
    if divides:
        scales = (local * of_all).clamp_max(most).to(torch.float8_e4m3fn).to(torch.float32)
        scales = torch.where(scales > 0, scales, torch.full_like(scales, 0.125))  # as each has it for a group of zeros
    else:
        scales = torch.where(local > 0, local / of_all, torch.ones_like(local))
        scales = scales.clamp(2.0**-9, most).to(torch.float8_e4m3fn).to(torch.float32)
    used = scales / of_all if divides else scales * of_all
    packed = _pairs(_codes_e2m1(groups / used[..., None])).reshape(rows, -1)
    return {
        codes: packed.view(like[codes].dtype),
        ".weight_scale": scales.to(torch.float8_e4m3fn),
        number: kept.clone(),
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
    size, flat = stated["blocksize"], values.to(torch.float32).flatten()
    blocks = functional.pad(flat, (0, -len(flat) % size)).reshape(-1, size)
    largest = blocks.abs().amax(-1)
    inside = (blocks / torch.where(largest > 0, largest, torch.ones_like(largest))[:, None]).flatten()[: len(flat)]
    codes = _nearest(functional.pad(inside, (0, len(flat) % 2)), whole(like[".quant_map"]))  # a pair for the last one
    made = {"": (codes[0::2] << 4 | codes[1::2]).view(like[""].dtype).reshape(like[""].shape)}
    if ".nested_absmax" in like:
        size, less = stated["nested_blocksize"], largest - stated["nested_offset"]
        outer = functional.pad(less, (0, -len(less) % size)).reshape(-1, size)
        made[".nested_absmax"] = outer.abs().amax(-1)
        inside = (outer / made[".nested_absmax"].clamp_min(2.0**-126)[:, None]).flatten()[: len(less)]
        largest = _nearest(inside, whole(like[".nested_quant_map"]))
    made[".absmax"] = largest
    return {tail: made[tail].to(part.dtype) if tail in made else whole(part).clone() for tail, part in like.items()}


def _nearest(values: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The place in ``table`` of the number that is nearest to each of ``values``, as bytes."""
    ordered, places = table.to(torch.float32).sort()
    return places.to(torch.uint8)[torch.bucketize(values, (ordered[1:] + ordered[:-1]) / 2, out_int32=True)]


def int8_rows(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """bitsandbytes' 8-bit integers ``.weight`` of a row over its largest value, ``.SCB`` (`int8_vectorwise_quant`)."""
    if values.dim() != 2:
        raise ValueError(f"it has {values.dim()} dimensions, where rows and columns are written")
    largest = values.to(torch.float32).abs().amax(1)
    steps = 127 / torch.where(largest > 0, largest, torch.ones_like(largest))
    codes = (values.to(torch.float32) * steps[:, None]).round().to(torch.int8)
    beside = {tail: whole(part).to(values.device) for tail, part in like.items() if tail == ".weight_format"}
    return {".weight": codes, ".SCB": largest.to(like[".SCB"].dtype), **beside}


def mxfp4_experts(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit floats of experts [experts, in, out]: ``_blocks`` [experts, out, in / 32, 16] and exponents, ``_scales``.

    As gpt-oss has them, and as its own tools make them (https://github.com/triton-lang/triton, triton_kernels,
    numerics_details/mxfp.py): the scale is the smallest power of two that clips nothing. The OCP microscaling formats
    say what the codes are (https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
    """
    if values.dim() != 3 or values.shape[1] % _GROUP:
        raise ValueError(f"its shape is {list(values.shape)}, where [experts, inputs in groups of {_GROUP}, outputs]")
    count, inputs, outputs = values.shape
    blocks = torch.empty(count, outputs, inputs // _GROUP, _GROUP // 2, dtype=torch.uint8, device=values.device)
    scales = torch.empty(count, outputs, inputs // _GROUP, dtype=torch.uint8, device=values.device)
    if not values.is_meta:
        for expert in range(count):  # float32 of all of them would be several times the weight
            groups = values[expert].T.to(torch.float32).contiguous().reshape(outputs, -1, _GROUP)
            blocks[expert], scales[expert] = _e2m1(groups)
    return {"_blocks": blocks, "_scales": scales}


def mxfp4_packed(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit floats of one weight, as compressed-tensors packs them: bytes ``.weight_packed`` [rows, columns / 2] and
    exponents ``.weight_scale`` [rows, groups]; the codes are those of :func:`mxfp4_experts`.
    """
    if values.dim() != 2 or values.shape[1] % _GROUP:
        raise ValueError(f"its shape is {list(values.shape)}, where [rows, columns in groups of {_GROUP}]")
    rows, columns = values.shape
    if values.is_meta:
        codes, scales = values.new_empty(rows, columns // 2), values.new_empty(rows, columns // _GROUP)
        return {".weight_packed": codes.to(torch.uint8), ".weight_scale": scales.to(torch.uint8)}
    codes, scales = _e2m1(values.to(torch.float32).reshape(rows, -1, _GROUP))
    return {".weight_packed": codes.reshape(rows, -1), ".weight_scale": scales}


def int4_packed(values: torch.Tensor, settings: Settings, like: Parts) -> dict[str, torch.Tensor]:
    """4-bit integers, eight in an int32, and a scale for each group of a row, as compressed-tensors packs them.

    ``.weight_packed`` [rows, columns / 8] with code + 8 from the lowest bits up, ``.weight_scale`` [rows, groups] and
    ``.weight_shape`` (https://github.com/vllm-project/compressed-tensors, compressors/pack_quantized). A group's scale
    is its largest magnitude / 7.5, as that package's symmetric observer has it.
    """
    size = _int4_group(settings)
    if values.dim() != 2 or values.shape[1] % size:
        raise ValueError(f"its shape is {list(values.shape)}, where [rows, columns in groups of {size}]")
    rows, columns = values.shape
    kept = like[".weight_scale"].dtype if like else torch.bfloat16
    numbers = like[".weight_shape"].dtype if like else torch.int64
    groups = values.to(torch.float32).reshape(rows, -1, size)
    scales = groups.abs().amax(-1) / (_INT4 - 0.5)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales)).clamp_min(2.0**-126).to(kept)
    codes = (groups / scales.to(torch.float32)[..., None]).round().clamp(-_INT4, _INT4 - 1).to(torch.int32) + _INT4
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=values.device)
    # no two codes share a bit, so their sum is their union; the last one's highest bit is the sign
    packed = (codes.reshape(rows, columns // 8, 8) << shifts).sum(-1, dtype=torch.int32)
    shape = torch.tensor([rows, columns], dtype=numbers, device=values.device)
    return {".weight_packed": packed, ".weight_scale": scales, ".weight_shape": shape}


def _int4_group(settings: Settings) -> int:
    """The columns with one scale; raises ValueError where the config says another layout than this one."""
    groups = [group["weights"] for group in (settings.get("config_groups") or {}).values() if group.get("weights")]
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


def _power_above(scales: torch.Tensor) -> torch.Tensor:
    """The smallest powers of two that are no smaller."""
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp(torch.ones_like(scales), exponent - (mantissa == 0.5).to(exponent.dtype))


def _exponents(powers: torch.Tensor) -> torch.Tensor:
    """Powers of two as bytes: their exponents + 127 (E8M0)."""
    return (torch.frexp(powers).exponent + 126).clamp(0, 254).to(torch.uint8)


def _e2m1(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``groups`` [.., 32], two in a byte [.., 16], the first in its low half; and their scales' bytes [..]."""
    largest = groups.abs().amax(-1)
    scales = torch.where(largest > 0, largest / _LARGEST_E2M1, torch.ones_like(largest)).clamp_min(2.0**-126)
    scales = _power_above(scales)
    return _pairs(_codes_e2m1(groups / scales[..., None])), _exponents(scales)


def _codes_e2m1(numbers: torch.Tensor) -> torch.Tensor:
    """The nearest 4-bit floats, as bytes."""
    codes = torch.bucketize(numbers.abs(), torch.tensor(_HALFWAY), out_int32=True).to(torch.uint8)
    return codes | (numbers < 0).to(torch.uint8) << 3


def _pairs(codes: torch.Tensor) -> torch.Tensor:
    """Two codes in a byte, the first in its low half."""
    return codes[..., 0::2] | codes[..., 1::2] << 4
