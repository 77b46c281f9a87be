"""MXFP4 and NVFP4 weights, as published, against transformers' and compressed-tensors' own dequantization."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from compressed_tensors.compressors.mx_utils import decompress_mx_scale
from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # semi-private, transformers 5.23
from transformers.integrations.mxfp4 import convert_moe_packed_tensors  # semi-private, transformers 5.23

from shardwright.files.arrays import mapped
from shardwright.weights.formats.plain_weights import plain
from tests.support.slices import assert_every_slice


def random_bytes(*shape: int, least: int = 0, most: int = 255) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randint(least, most + 1, shape, dtype=torch.uint8)


# a power of two whose product with any code is a normal number of bfloat16
EXPONENTS = {"least": 3, "most": 251}


@pytest.mark.parametrize(("experts", "out", "inputs"), [(4, 6, 64), (1, 5, 32), (3, 1, 96)])
def test_the_experts_of_gpt_oss(experts, out, inputs):
    blocks = random_bytes(experts, out, inputs // 32, 16)
    scales = random_bytes(experts, out, inputs // 32, **EXPONENTS)
    found = plain({"a.down_proj_blocks": blocks, "a.down_proj_scales": scales}, {"quant_method": "mxfp4"})
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert [*found.tensors] == [*found.packed] == ["a.down_proj"]
    assert_every_slice(found.tensors["a.down_proj"], theirs)


def test_experts_that_transformers_saved_dequantized_under_the_quantized_names():
    values = torch.randn(4, 64, 12).bfloat16()
    found = plain({"a.gate_up_proj_blocks": values, "a.gate_up_proj_bias": values[:, 0]}, {})
    assert [*found.tensors] == ["a.gate_up_proj_bias", "a.gate_up_proj"]
    assert not found.packed
    assert_every_slice(found.tensors["a.gate_up_proj"], values)


@pytest.mark.parametrize("tail", [".scale", ".weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu], ids=str)
def test_the_experts_of_deepseek_v4(dtype, tail):
    codes, scales = random_bytes(5, 48).view(torch.int8), random_bytes(5, 3, **EXPONENTS).view(dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
    found = plain({"w1.weight": codes, "w1" + tail: scales}, {"weight_block_size": [128, 128]})
    assert_every_slice(found.tensors["w1.weight"], theirs)


def test_mxfp4_of_compressed_tensors():
    parts = {"weight_packed": random_bytes(7, 48), "weight_scale": random_bytes(7, 3, **EXPONENTS)}
    # its own decompression is not written yet: the pieces of one that it has
    factors = decompress_mx_scale(parts["weight_scale"]).repeat_interleave(32, 1)
    theirs = unpack_fp4_from_uint8(parts["weight_packed"], 7, 96) * factors
    found = plain({f"a.{name}": tensor for name, tensor in parts.items()}, {"format": "mxfp4-pack-quantized"})
    assert found.packed["a.weight"].form.title == "MXFP4"
    assert_every_slice(found.tensors["a.weight"], theirs)


def test_nvfp4_of_compressed_tensors():
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16),
    )
    torch.manual_seed(0)
    scales = (torch.rand(7, 5) * 400 + 1).to(torch.float8_e4m3fn)
    parts = {"weight_packed": random_bytes(7, 40), "weight_scale": scales, "weight_global_scale": torch.tensor([877.1])}
    theirs = NVFP4PackedCompressor.decompress(parts, scheme)["weight"]
    tensors = {f"a.{name}": tensor for name, tensor in parts.items()} | {"a.input_global_scale": torch.ones(1)}
    found = plain(tensors, {"format": "nvfp4-pack-quantized"})
    assert found.unread == {"a.input_global_scale"}
    assert_every_slice(found.tensors["a.weight"], theirs.to(torch.bfloat16))


@pytest.mark.parametrize("shape", [(), (1,)], ids=str)
def test_nvfp4_of_modelopt(shape):
    """``modelopt.safetensors`` has what nvidia-modelopt 0.47.0 itself gave of ``weight``, a group of zeros in it.

    `NVFP4QTensor.quantize(weight, 16)`, and its `dequantize` to bfloat16 of that.
    """
    held = load_file(Path(__file__).with_name("modelopt.safetensors"))
    factor = held["scale_2"].reshape(shape)
    parts = {".weight": held["codes"], ".weight_scale": held["scale"], ".weight_scale_2": factor}
    tensors = {f"a{tail}": part for tail, part in parts.items()} | {"a.input_scale": factor}
    found = plain(tensors | {"self_attn.k_proj.k_scale": factor}, {"quant_method": "modelopt", "quant_algo": "NVFP4"})
    assert [*found.tensors] == ["a.weight"]
    assert found.packed["a.weight"].form.title == "NVFP4"
    # its table has 0 for -0
    values = mapped(found.tensors["a.weight"], lambda part: part + 0.0, torch.bfloat16)
    assert_every_slice(values, held["expected"])
    again = found.packed["a.weight"].form.encode(held["weight"], {}, parts)
    assert all(
        torch.equal(again[tail].view(torch.uint8), parts[tail].view(torch.uint8))
        for tail in (".weight", ".weight_scale")
    )
    assert torch.equal(again[".weight_scale_2"], factor)
