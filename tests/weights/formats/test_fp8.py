"""FP8 weights, as published, against transformers' own dequantization and DeepSeek's rule."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize  # semi-private, transformers 5.23

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.model.meta_model import meta_model
from shardwright.weights import hub_read
from shardwright.weights.formats.plain_weights import plain
from tests.support.hub_models import config_of, save_theirs
from tests.support.slices import assert_every_slice

SETTINGS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
PER_TENSOR = {"quant_method": "fp8", "weight_block_size": None}


def random_codes(*shape: int) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(torch.float8_e4m3fn)


def by_hand(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """DeepSeek's rule, element by element: the code times the scale of the block that it lies in."""
    rows, columns = (torch.arange(size) // 128 for size in codes.shape)
    return (codes.float() * scales.float()[rows][:, columns]).to(torch.bfloat16)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu, torch.uint8], ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(256, 384), (576, 200), (1, 129), (128, 128)])
def test_blocks_of_any_shape_and_every_slice_of_them(rows, columns, scale_dtype):
    codes, grid = random_codes(rows, columns), (-(-rows // 128), -(-columns // 128))
    exponents = torch.randint(110, 130, grid, dtype=torch.uint8)
    scales = exponents if scale_dtype == torch.uint8 else ((exponents.float() - 127).exp2() * 1.0).to(scale_dtype)
    factors = (exponents.float() - 127).exp2()
    values = plain({"a.weight": codes, "a.weight_scale_inv": scales}, SETTINGS).tensors["a.weight"]
    expected = by_hand(codes, factors)
    if rows % 128 == columns % 128 == 0:
        theirs = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        assert torch.equal(expected, theirs)
    assert_every_slice(values, expected)


ONE_SCALE = {
    "a number": ((), ".weight_scale_inv", PER_TENSOR),
    "[1]": ((1,), ".weight_scale", {}),
    "[1, 1]": ((1, 1), ".weight_scale", {}),
    "a row each": ((6,), ".weight_scale", {}),
    "a row each, as a column": ((6, 1), ".weight_scale", {}),
}


@pytest.mark.parametrize(("shape", "tail", "settings"), ONE_SCALE.values(), ids=ONE_SCALE)
def test_one_scale_or_one_a_row(shape, tail, settings):
    codes, scales = random_codes(6, 10), torch.rand(shape) + 0.5
    values = plain({"a.weight": codes, "a" + tail: scales, "a.input_scale": torch.ones(())}, settings).tensors
    factors = scales.reshape(-1, 1) if scales.numel() > 1 else scales
    assert list(values) == ["a.weight"]
    assert torch.equal(whole(values["a.weight"]), (codes.float() * factors).to(torch.bfloat16))


OF_16 = {"config_groups": {"group_0": {"weights": {"group_size": 16}}}}
GROUPS = {"MXFP8": (96, 32, {}), "groups of 16 columns": (40, 16, OF_16)}


@pytest.mark.parametrize(("columns", "group", "settings"), GROUPS.values(), ids=GROUPS)
def test_a_scale_for_each_group_of_columns(columns, group, settings):
    codes, exponents = random_codes(6, columns), torch.randint(110, 130, (6, -(-columns // group)), dtype=torch.uint8)
    factors = (exponents.float() - 127).exp2().repeat_interleave(group, 1)[:, :columns]
    values = plain({"a.weight": codes, "a.weight_scale": exponents}, settings).tensors["a.weight"]
    assert_every_slice(values, (codes.float() * factors).to(torch.bfloat16))


def test_fused_experts_as_transformers_saves_them():
    codes, scales = random_codes(3, 130, 64), torch.rand(3, 2, 1) + 0.5
    parts = {"_scale_inv": scales, "_activation_scale": torch.ones(3)}
    tensors = {f"experts.gate_up_proj{tail}": part for tail, part in parts.items()}
    found = plain(tensors | {"experts.gate_up_proj": codes}, SETTINGS)
    expected = torch.stack([by_hand(*expert) for expert in zip(codes, scales, strict=True)])
    assert found.tensors.keys() == {"experts.gate_up_proj"}
    assert_every_slice(found.tensors["experts.gate_up_proj"], expected)


BROKEN = {
    "a scale is missing": ({"a.weight": random_codes(2, 2)}, SETTINGS, "1 tensors of codes without their scales: a.w"),
    "a scale is cut off": (
        {"a.weight": random_codes(256, 256), "a.weight_scale_inv": torch.ones(2, 1)},
        SETTINGS,
        r"a\.weight in FP8 in blocks: its scale has shape \[2, 1\], where \[2, 2\], one for each 128 × 128",
    ),
    "too many rows": (
        {"a.weight": random_codes(6, 4), "a.weight_scale": torch.ones(5)},
        {},
        r"its scale has shape \[5, 1\]",
    ),
    "blocks that are no numbers": (
        {"a.weight": random_codes(2, 2), "a.weight_scale_inv": torch.ones(1, 1)},
        {"weight_block_size": "128x128"},
        "a.weight in FP8 in blocks: ",
    ),
}


@pytest.mark.parametrize(("tensors", "settings", "message"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_go_together_are_refused_by_name(tensors, settings, message):
    with pytest.raises(ValueError, match=message):
        plain(tensors, settings)


def quantize(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The layers' projections in FP8 blocks of 128 × 128."""
    found = {}
    for name, values in tensors.items():
        if "proj" not in name and "w1" not in name:
            found[name] = values
            continue
        rows, columns = (torch.arange(size) // 128 for size in values.shape)
        scales = torch.rand(-(-values.shape[0] // 128), -(-values.shape[1] // 128)) / 100 + 1e-3
        found[name] = (values / scales[rows][:, columns]).to(torch.float8_e4m3fn)
        found[name + "_scale_inv"] = scales
    return found


def test_a_published_folder_is_read_by_the_shard_and_half_a_weight_reads_half_of_the_bytes(tmp_path):
    config = config_of("llama", hidden_size=192, intermediate_size=320)
    save_theirs(tmp_path, config)
    file = tmp_path / "model.safetensors"
    save_file(tensors := quantize(load_file(file)), file)
    settings = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": SETTINGS}
    config.quantization_config = settings["quantization_config"]
    weights, read = hub_read.open_hub_weights(str(tmp_path), meta_model(config)), []
    assert weights.said == "FP8 in blocks (21 tensors), dequantized to bfloat16"
    weights.watch = read.append
    name = "model.layers.1.mlp.down_proj.weight"
    expected = by_hand(tensors[name], tensors[name + "_scale_inv"])
    assert torch.equal(weights(name)[slice(0, 192), slice(160, 320)], expected[:, 160:])
    assert sum(read) == 192 * 160 + 2 * 2 * 4
    save_file({n: t for n, t in tensors.items() if n != name + "_scale_inv"}, file)
    with pytest.raises(UserError, match=rf"codes without their scales: {name}"):
        hub_read.open_hub_weights(str(tmp_path), meta_model(config))
