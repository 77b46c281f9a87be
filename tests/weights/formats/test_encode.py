"""One weight in each format that an export writes: the nearest codes, as the format's own package reads them."""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import quantize as compressed_tensors_quantize
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from transformers import (
    FineGrainedFP8Config,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize  # semi-private, transformers 5.23
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # semi-private, transformers 5.23

from shardwright.files.arrays import whole
from shardwright.weights.formats.encode import fp8_blocks, int4_packed, mxfp4_experts, nvfp4
from shardwright.weights.formats.mxfp4 import PACKED as MXFP4_PACKED
from shardwright.weights.formats.plain_weights import plain
from shardwright.weights.quantize import SCHEMES
from tests.support import quantized
from tests.support.hub_models import same

INT4 = SCHEMES["int4"][0].settings


SHAPES = [(256, 384), (300, 200), (576, 130), (1, 129), (7, 5)]
SCALES = [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8]


@pytest.mark.parametrize("scale_dtype", SCALES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_fp8_blocks_hold_every_weight_to_half_a_step_of_its_code(shape, scale_dtype):
    torch.manual_seed(0)
    weight = torch.randn(shape) * torch.logspace(-4, 2, shape[0]).unsqueeze(1)
    weight[:1, :128] = 0
    grid = tuple(-(-size // 128) for size in shape)
    like = {
        ".weight": torch.empty(0, dtype=torch.float8_e4m3fn),
        ".weight_scale_inv": torch.empty(grid, dtype=scale_dtype),
    }
    parts = fp8_blocks(".weight_scale_inv", weight, {"weight_block_size": [128, 128]}, like)
    scales = parts[".weight_scale_inv"]
    assert (scales.dtype, tuple(scales.shape)) == (scale_dtype, grid)
    rows, columns = (torch.arange(size) // 128 for size in shape)
    exact = scales if scale_dtype != torch.uint8 else scales.view(torch.float8_e8m0fnu)
    spread = exact.float()[rows][:, columns]
    values = parts[".weight"].float() * spread
    # half a step: 2^-4 of the value, or 2^-10 where the code has no leading one
    assert ((values - weight).abs() <= torch.maximum(weight.abs() * 2**-4, spread * 2**-10) * 1.01).all()
    tensors = {f"a{tail}": part for tail, part in parts.items()}
    read = whole(plain(tensors, {"weight_block_size": [128, 128]}).tensors["a.weight"])
    assert torch.equal(read, values.to(torch.bfloat16))
    if shape[0] % 128 == shape[1] % 128 == 0:
        assert torch.equal(read, Fp8Dequantize(None)._dequantize_one(parts[".weight"], scales, torch.bfloat16))


def test_fp8_blocks_are_those_that_transformers_makes():
    torch.manual_seed(0)
    weight = torch.randn(256, 384)
    for scale_fmt in ("float", "ue8m0"):
        config = FineGrainedFP8Config(weight_block_size=(128, 128), scale_fmt=scale_fmt)
        quantizer = type("Quantizer", (), {"quantization_config": config})
        theirs = Fp8Quantize(quantizer)._quantize_one("a.weight", weight)
        ours = fp8_blocks(".weight_scale_inv", weight, {"scale_fmt": scale_fmt}, {})
        scales = theirs["a.weight_scale_inv"].float()
        assert torch.allclose(ours[".weight_scale_inv"], scales, rtol=1e-6)
        differ = ours[".weight"].float() != theirs["a.weight"].float()
        assert differ.float().mean() < 1e-3  # theirs multiplies by the rounded inverse of the scale


@pytest.mark.parametrize(("experts", "inputs", "outputs"), [(3, 96, 40), (1, 32, 1), (2, 64, 33)])
def test_mxfp4_experts_have_the_nearest_codes_and_are_read_as_transformers_reads_them(experts, inputs, outputs):
    torch.manual_seed(0)
    weight = (torch.randn(experts, inputs, outputs) * torch.logspace(-3, 2, outputs)).to(torch.bfloat16)
    weight[0, :32, 0] = 0
    parts = mxfp4_experts(weight, {}, {})
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"])
    read = whole(plain({f"a.up{tail}": part for tail, part in parts.items()}, {}).tensors["a.up"])
    assert torch.equal(read, theirs)
    scales = (parts["_scales"].float() - 127).exp2().repeat_interleave(32, -1).transpose(1, 2)
    grid = torch.cat([quantized.FP4, -quantized.FP4])
    distances = (weight.float().unsqueeze(-1) - scales.unsqueeze(-1) * grid).abs().amin(-1)
    assert torch.equal((weight.float() - read.float()).abs(), distances)
    largest = weight.float().abs().unflatten(1, (-1, 32)).amax(2)
    per_group = (parts["_scales"].float() - 127).exp2().transpose(1, 2)
    some = largest > 0
    assert (largest[some] <= 6 * per_group[some]).all()  # nothing is clipped
    assert (largest[some] > 3 * per_group[some]).all()
    again = mxfp4_experts(read, {}, {})
    assert torch.equal(convert_moe_packed_tensors(again["_blocks"], again["_scales"]), read)


@pytest.mark.parametrize(("rows", "columns"), [(64, 96), (7, 32)])
def test_mxfp4_bytes_of_one_weight_are_unpacked_by_compressed_tensors_to_what_is_read(rows, columns):
    torch.manual_seed(0)
    weight = (torch.randn(rows, columns) * torch.logspace(-3, 2, rows).unsqueeze(1)).to(torch.bfloat16)
    parts = MXFP4_PACKED.encode(weight, {}, {})
    codes = unpack_fp4_from_uint8(parts[".weight_packed"], rows, columns, torch.float32)
    factors = decompress_mx_scale(parts[".weight_scale"]).float().repeat_interleave(32, 1)
    read = whole(plain({f"a{tail}": part for tail, part in parts.items()}, {}).tensors["a.weight"])
    assert torch.equal(read, (codes * factors).to(torch.bfloat16))
    experts = {f"a{tail}": part for tail, part in mxfp4_experts(weight.T.unsqueeze(0), {}, {}).items()}
    assert torch.equal(whole(plain(experts, {}).tensors["a"])[0].T, read)


FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
SHARED = {  # by compressed-tensors' names of it: the scales' shape, for 24 x 96
    "channel": ((24, 1), {"strategy": "channel"}),
    "tensor": ((1,), {"strategy": "tensor"}),
    "group": ((24, 3), {"strategy": "group", "group_size": 32}),
}


@pytest.mark.parametrize("number", [FP8, INT8], ids=["fp8", "int8"])
@pytest.mark.parametrize(("shape", "shared"), SHARED.values(), ids=SHARED)
def test_8_bit_codes_are_those_that_compressed_tensors_makes(number, shape, shared):
    torch.manual_seed(0)
    weight = (torch.randn(24, 96) * torch.logspace(-3, 2, 24).unsqueeze(1)).to(torch.bfloat16)
    weight[0, :32] = 0
    args = QuantizationArgs(**number, **shared)
    size = {(24, 1): 96, (24, 3): 32}.get(shape, 24 * 96)
    parts = weight.float().reshape(-1, size)
    scales, zeros = calculate_qparams(parts.amin(1).reshape(shape), parts.amax(1).reshape(shape), args)
    dtype = torch.float8_e4m3fn if number is FP8 else torch.int8
    theirs = compressed_tensors_quantize(weight.float(), scales, zeros, args, dtype=dtype)
    settings = {"config_groups": {"group_0": {"weights": {**number, **shared}}}}
    like = {".weight": torch.empty(24, 96, dtype=dtype), ".weight_scale": torch.empty(shape)}
    (form,) = [each.form for each in plain({f"a{tail}": part for tail, part in like.items()}, settings).packed.values()]
    found = form.encode(weight, settings, like)
    kept = (scales > 2e-7).reshape(shape)  # theirs of a group of zeros is the least number
    assert torch.allclose(found[".weight_scale"][kept], scales[kept], rtol=1e-6)
    differ = (found[".weight"].float() != theirs.float()).float().mean()
    assert differ < 2e-3  # what lies halfway after the last bit of a scale
    read = whole(plain({f"a{tail}": part for tail, part in found.items()}, settings).tensors["a.weight"])
    assert (read.float() - weight.float()).norm() < 0.03 * weight.float().norm()


def test_nvfp4_is_what_compressed_tensors_makes_with_the_base_s_number():
    torch.manual_seed(0)
    weight = (torch.randn(24, 96) * torch.logspace(-3, 2, 24).unsqueeze(1)).to(torch.bfloat16)
    weight[0, :16] = 0
    number = generate_gparam(weight.float().amin(), weight.float().amax())
    args = preset_name_to_scheme("NVFP4A16", ["Linear"])
    groups = weight.float().reshape(24, -1, 16)
    scales, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args.weights, global_scale=number)
    state = {"weight": weight.float(), "weight_scale": scales, "weight_global_scale": number}
    with torch.compiler.set_stance("force_eager"):
        theirs = {f".{name}": part for name, part in NVFP4PackedCompressor.compress(state, args).items()}
    found = nvfp4(".weight_packed", ".weight_global_scale", weight, {}, theirs)
    assert same(found, theirs)
    read = whole(plain({f"a{tail}": part for tail, part in found.items()}, {}).tensors["a.weight"])
    back = NVFP4PackedCompressor.decompress({name[1:]: part for name, part in found.items()}, args)["weight"]
    assert torch.equal(read, back.to(torch.bfloat16))
    grown = nvfp4(".weight_packed", ".weight_global_scale", 1.25 * weight, {}, theirs)
    clipped = whole(plain({f"a{tail}": part for tail, part in grown.items()}, {}).tensors["a.weight"]).float()
    assert clipped.abs().max() == pytest.approx(weight.float().abs().max().item(), rel=0.01)
    assert torch.isfinite(clipped).all()


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("rows", [64, 7])
def test_int4_words_are_those_that_compressed_tensors_packs_with_these_scales(rows, group):
    torch.manual_seed(0)
    weight = (torch.randn(rows, 384) * torch.logspace(-3, 2, rows).unsqueeze(1)).to(torch.bfloat16)
    weight[0, :group] = 0
    settings = json.loads(json.dumps(INT4))
    settings["config_groups"]["group_0"]["weights"]["group_size"] = group
    parts = int4_packed(weight, settings, {})
    args = QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=group, symmetric=True)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    state = {name.removeprefix("."): part for name, part in parts.items()}
    theirs = PackedQuantizationCompressor.compress(
        {"weight": weight.float(), "weight_scale": state["weight_scale"].float()}, scheme
    )
    assert torch.equal(parts[".weight_packed"], theirs["weight_packed"])
    assert torch.equal(parts[".weight_shape"], theirs["weight_shape"])
    read = whole(plain({f"a{tail}": part for tail, part in parts.items()}, settings).tensors["a.weight"])
    assert torch.equal(read, PackedQuantizationCompressor.decompress(state, scheme)["weight"])
    error = (read.float() - weight.float()).abs()
    assert (
        error <= parts[".weight_scale"].float().repeat_interleave(group, 1) * 0.55
    ).all()  # half a step, and what bfloat16 rounds
