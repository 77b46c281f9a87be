"""Packings give the values of those who publish in them, and take them back without a difference."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import FineGrainedFP8Config

# semi-private: transformers/integrations/mxfp4.py and finegrained_fp8.py, transformers 5.23
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from shardwright.arguments.adapter_options import PACKED
from shardwright.models.adapters.packings.registry import PACKINGS, Packing, Weight
from shardwright.models.experts import grouped_matmul, unpacking
from shardwright.models.ops.jax_call import jnp
from tests.support.paths import ROOT

INT8, FP8, FP8_ROWS, MXFP4 = (PACKINGS[word] for word in ("int8", "fp8", "fp8_rows", "mxfp4"))
NF4, NVFP4 = PACKINGS["nf4"], PACKINGS["nvfp4"]
# of a [2, 64] weight in bfloat16, (i * 37 % 101 - 50) / 32 for i = 0, 1, …; bitsandbytes 0.50.2 on a CPU,
# quantize_4bit(…, blocksize=64, quant_type="nf4"): first codes are high halves of bytes
BNB_CODES = (
    "04c16e29f3b05d17e29f3c05d18e2af4c16e18e3b05d17e29f3b05d18e2af4c1"
    "6d18e3b04c17e29f3b05d17e2af4c06d18e2a04c16e29f3b05d17e29f3c05d18"
)


def again(packing: Packing, values: torch.Tensor, weight: Weight) -> torch.Tensor:
    return packing.unpack(*packing.pack(values, weight), weight, values.dtype)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def test_the_option_knows_the_words_of_all_packings_and_the_page_what_packing_again_makes_of_each():
    assert list(PACKINGS) == PACKED
    page = (ROOT / "docs/adapters.md").read_text(encoding="utf-8")
    rows = {word: row for row in page.splitlines() for word in PACKINGS if row.startswith(f"| `{word}` |")}
    for word, packing in PACKINGS.items():
        assert rows[word].endswith("| as `fp8` |" if word == "fp8_rows" else f"| {packing.again} |")


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize(("shape", "inputs"), [((3, 320, 192), -1), ((3, 192, 320), -2), ((100, 64), -1)], ids=str)
def test_parts_are_as_stated_and_packing_again_changes_nothing(packing, shape, inputs):
    weight, values = Weight(shape, inputs), noise(*shape)
    values[..., 0, :], values[..., :, 1] = 0, 0
    codes, scale = packing.pack(values, weight)
    for found, part in ((codes, packing.codes(weight)), (scale, packing.scales(weight))):
        assert (tuple(found.shape), found.dtype) == (part.shape, part.dtype)
    unpacked = packing.unpack(codes, scale, weight, torch.float32)
    assert torch.equal(again(packing, unpacked, weight), unpacked)
    assert ((unpacked - values).norm() / values.norm()).item() < (0.03 if packing.bits >= 8 else 0.12)
    assert not unpacked[values == 0].any()
    assert not packing.lacking(weight)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_value_that_is_no_finite_number_is_refused(value):
    with pytest.raises(ValueError, match="no finite number"):
        MXFP4.pack(torch.full((2, 64), value), Weight((2, 64)))


def test_an_int8_value_is_off_by_half_a_scale_at_most():
    values, weight = noise(3, 5, 64), Weight((3, 5, 64))
    codes, scale = INT8.pack(values, weight)
    assert codes.abs().amax(-1).eq(127).all()
    assert ((INT8.unpack(codes, scale, weight, torch.float32) - values).abs() <= scale * 0.50001).all()


@pytest.mark.parametrize("inputs", [-1, -2])
def test_mxfp4_as_published_is_kept_bit_for_bit(inputs):
    made = torch.Generator().manual_seed(0)
    blocks = torch.randint(0, 256, (2, 40, 3, 16), dtype=torch.uint8, generator=made)
    scales = torch.randint(90, 150, (2, 40, 3), dtype=torch.uint8, generator=made)
    published = convert_moe_packed_tensors(blocks, scales)  # [experts, inputs, outputs]
    assert published.shape == (2, 96, 40)
    values = published if inputs == -2 else published.transpose(1, 2).contiguous()
    assert torch.equal(again(MXFP4, values, Weight(tuple(values.shape), inputs)), values)


@pytest.mark.parametrize("packing", PACKINGS.values(), ids=PACKINGS)
@pytest.mark.parametrize("inputs", [-1, -2])
@pytest.mark.parametrize("most", [1, 2**27], ids=["one at a time", "all at once"])
def test_experts_are_unpacked_inside_a_product_as_outside_of_it(packing, inputs, most, monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_BYTES", most)
    shape, sizes = (4, 192, 320), jnp.asarray([50, 0, 100, 30], jnp.int32)
    weight = Weight(shape, inputs)
    parts = packing.pack(noise(*shape), weight)
    by = unpacking.unpacking_of(packing, weight, torch.float32, shape[0])
    packed = unpacking.PackedExperts(*(jnp.asarray(part.float().numpy(), str(part.dtype)[6:]) for part in parts), by)
    outside = packing.unpack(*parts, weight, torch.float32).numpy()
    outside = outside.swapaxes(1, 2) if by.turned else outside
    assert by.experts == (1 if most == 1 else 4)
    np.testing.assert_array_equal(packed.whole(), outside)
    for last in (True, False):
        x = jnp.asarray(noise(256, outside.shape[2 if last else 1]).numpy())
        given = (sizes, grouped_matmul.tiles_for(256, 4, 0.0))
        expected = grouped_matmul.multiply(x, jnp.asarray(outside), *given, contract_last=last)
        np.testing.assert_array_equal(packed.multiply(x, *given, contract_last=last)[:180], expected[:180])


@pytest.mark.parametrize("packing", [INT8, FP8, FP8_ROWS, NF4, NVFP4], ids=lambda packing: packing.title)
def test_values_of_any_float32_scales_are_found_again_bit_for_bit(packing):
    weight = Weight((512, 1024))
    codes, scale = packing.pack(noise(*weight.shape), weight)
    scale = torch.rand(scale.shape, generator=torch.Generator().manual_seed(1)) / 100
    values = packing.unpack(codes, scale, weight, torch.float32)
    assert torch.equal(again(packing, values, weight), values)


@pytest.mark.parametrize("numbers", [(6, 3, 1.5), (4, 2, 1), (2, 1, 0.5), (3, 2), (0.5,)], ids=str)
def test_nvfp4_blocks_of_few_numbers_are_found_again_bit_for_bit(numbers):
    codes = torch.tensor((0, *numbers, *(-n for n in numbers)))[torch.arange(1024 * 256).reshape(1024, 256) % 7 % 3]
    scales = torch.rand(1024, 16, generator=torch.Generator().manual_seed(0))
    values = codes * scales.repeat_interleave(16, 1)
    assert torch.equal(again(NVFP4, values, Weight((1024, 256))), values)


def test_mxfp4_rounds_to_the_nearest_and_in_the_middle_to_the_even_code():
    given = [6.0, 0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -5.1, -0.2]
    values = torch.tensor([given + [0.0] * 21])
    expected = [6.0, 0.0, 0.5, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, -6.0, 0.0]
    assert again(MXFP4, values, Weight((1, 32)))[0, :11].tolist() == expected


@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
def test_fp8_blocks_are_transformers_own(scale_fmt):
    quantizer = SimpleNamespace(quantization_config=FineGrainedFP8Config(scale_fmt=scale_fmt))
    name, values = "layer.weight", noise(256, 384) * torch.logspace(-3, 1, 384)
    made = Fp8Quantize(quantizer).convert({name: values})
    codes, scale = made[name], made["layer.weight_scale_inv"].to(torch.float32)
    weight = Weight((256, 384), -1, (4, 1))  # a device has half a block's rows
    for dtype in (torch.float32, torch.bfloat16):
        theirs = Fp8Dequantize(quantizer)._dequantize_one(codes, scale, dtype)
        assert torch.equal(FP8.unpack(*FP8.arrange(codes, scale, weight), weight, dtype), theirs)
        ours, found = FP8.pack(theirs, weight)
        if scale_fmt == "ue8m0":  # powers of two are found again, or halves of them with twice the codes
            assert torch.equal(FP8.unpack(ours, found, weight, dtype), theirs)
        else:  # other scales but for the rounding of the values, and so the same codes
            assert torch.equal(ours.view(torch.float8_e4m3fn), codes)
            torch.testing.assert_close(found, scale, rtol=2**-8 if dtype == torch.bfloat16 else 2**-22, atol=0)


def test_fp8_numbers_are_torchs_and_a_last_block_may_be_cut_off():
    every = torch.arange(256, dtype=torch.uint8)
    numbers = every[(every & 127) != 127].view(torch.float8_e4m3fn)  # but for NaN
    weight = Weight((len(numbers), 1))
    assert torch.equal(
        FP8_ROWS.unpack(numbers.view(torch.uint8)[:, None], torch.ones(len(numbers), 1), weight, torch.float32)[:, 0],
        numbers.to(torch.float32),
    )
    weight, values = Weight((200, 130)), noise(200, 130)
    codes, scale = FP8.pack(values, weight)
    assert scale.shape == (2, 2)
    whole = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:200, :130]
    assert torch.equal(
        FP8.unpack(codes, scale, weight, torch.float32), codes.view(torch.float8_e4m3fn).to(torch.float32) * whole
    )


def test_nf4_codes_and_values_are_bitsandbytes_own():
    values = ((torch.arange(128) * 37 % 101 - 50) / 32).reshape(2, 64).to(torch.bfloat16)
    weight = Weight((2, 64))
    codes, scale = NF4.quantize(values.to(torch.float32), weight)
    theirs = torch.frombuffer(bytearray.fromhex(BNB_CODES), dtype=torch.uint8)
    assert torch.equal(codes, torch.stack([theirs >> 4, theirs & 15], -1).reshape(2, 64))
    assert scale[:, 0].tolist() == values.abs().amax(1).tolist()
    # packed again in bfloat16, as bitsandbytes dequantizes it
    unpacked = again(NF4, values, weight)
    assert torch.equal(again(NF4, unpacked, weight), unpacked)
