"""Folders of quantized weights that can't be read as they stand: refused by file and tensor when they are opened."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.model.meta_model import meta_model
from shardwright.weights import hub_read
from shardwright.weights.formats.plain_weights import plain
from shardwright.weights.weight_files import INDEX
from tests.support import quantized
from tests.support.hub_models import config_of, save_theirs

NAME = "model.layers.1.mlp.down_proj"
MXFP4 = quantized.mxfp4(".weight_packed", ".weight_scale", torch.uint8, torch.uint8)
NVFP4 = quantized.nvfp4(".weight", ".weight_scale_2", divides=False)


def fewer_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:-1].contiguous()


# scheme, settings, end of a name -> what is done to that tensor of one weight (None: it is lost), message
BROKEN: dict[str, tuple[Any, dict[str, Any], str, Any, str]] = {
    "a scale is missing": (
        *(MXFP4, {}, ".weight_scale", None),
        rf"1 tensors of codes without their scales: {NAME}\.weight_packed; .* has beside it nothing",
    ),
    "a scale for all is missing": (
        *(NVFP4, {}, ".weight_scale_2", None),
        rf"{NAME}\.weight in uint8 has beside it {NAME}\.weight_scale in float8_e4m3fn",
    ),
    "scales are cut off": (
        *(NVFP4, {}, ".weight_scale", fewer_rows),
        rf"{NAME}\.weight in NVFP4: its scale has shape \[63, 8\], where \[64, 8\], one for each 16 of \[64, 128\]",
    ),
    "codes are cut off": (
        *(quantized.int4, {}, ".weight_packed", fewer_rows),
        rf"{NAME}\.weight in INT4 or INT8, packed: weight_packed has shape \[63, 16\]",
    ),
    "scales of another kind": (
        *(MXFP4, {}, ".weight_scale", torch.Tensor.float),
        rf"{NAME}\.weight_packed in uint8 has beside it {NAME}\.weight_scale in float32",
    ),
    "codes of another kind": (
        *(quantized.int8, {}, ".weight", torch.Tensor.float),
        rf"2 left over: {NAME}\.SCB, {NAME}\.weight_format",
    ),
    "activations that are rotated": (
        *(MXFP4, {"transform_config": {"config_groups": {"R3": {"apply": [{"location": "q_attn"}]}}}}, "", None),
        "transform_config says that activations are rotated as the model runs, at q_attn",
    ),
}


@pytest.mark.parametrize(("scheme", "settings", "tail", "change", "message"), BROKEN.values(), ids=BROKEN)
def test_it_is_refused_by_file_and_tensor(tmp_path, scheme, settings, tail, change, message):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    quantized.quantize(tmp_path, {quantized.PROJECTIONS.pattern: scheme})
    tensors = load_file(tmp_path / "model.safetensors")
    changed = tensors.pop(NAME + tail, None)
    if change:
        tensors[NAME + tail] = change(changed)
    in_files(tmp_path, tensors)
    config.quantization_config = settings
    with pytest.raises(UserError, match=message) as refused:
        hub_read.open_hub_weights(str(tmp_path), meta_model(config))
    if "left over" not in message:
        assert refused.value.found.endswith(f"(in model-{2 if tail else 1}.safetensors)")


def in_files(folder, tensors):
    """Two files and their index; the second has layer 1."""
    (folder / "model.safetensors").unlink()
    where = {name: f"model-{2 if 'layers.1.' in name else 1}.safetensors" for name in tensors}
    for file in set(where.values()):
        save_file({name: tensor for name, tensor in tensors.items() if where[name] == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))


def test_a_method_that_is_not_read_is_named_beside_its_tensors(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    tensors = load_file(file := tmp_path / "model.safetensors")
    del tensors[NAME + ".weight"]
    codes = {"codes": torch.zeros(8, 16, 1, dtype=torch.int16), "codebooks": torch.ones(1, 256, 1, 8).half()}
    save_file(tensors | {f"{NAME}.{name}": value for name, value in codes.items()}, file)
    config.quantization_config = {"quant_method": "aqlm", "nbits_per_codebook": 16}
    message = rf"missing: {NAME}\.weight; tensors 2 left over: {NAME}\.codebooks(.|\n)*are quantized \(aqlm\), in a way"
    with pytest.raises(UserError, match=message):
        hub_read.open_hub_weights(str(tmp_path), meta_model(config))


def test_layers_in_several_formats_and_some_in_none_are_read(tmp_path):
    config = config_of("llama")
    save_theirs(tmp_path, config)
    schemes = {"layers.0.*proj": MXFP4, "layers.1.mlp": NVFP4, "layers.1.*proj": quantized.fp8_rows}
    expected = quantized.quantize(tmp_path, schemes)
    weights = hub_read.open_hub_weights(str(tmp_path), meta_model(config))
    assert weights.said == "NVFP4 (3 tensors), FP8 (4 tensors), MXFP4 (7 tensors), dequantized to bfloat16"
    for name, values in expected.items():
        assert torch.equal(whole(weights(name)), values), name
    # what is no number in a scale, a code or a plain weight is told when it is read, with all of the rest untouched
    tensors = load_file(tmp_path / "model.safetensors")
    spoilt = {
        "model.layers.0.mlp.up_proj": (".weight_scale", 255),
        "model.layers.1.self_attn.k_proj": (".weight", 127),
        "model.layers.1.mlp.up_proj": (".weight_scale_2", torch.inf),
        "model.norm": (".weight", torch.nan),
    }
    for name, (tail, value) in spoilt.items():
        flat = tensors[name + tail].reshape(-1)
        (flat.view(torch.uint8) if flat.dtype.itemsize == 1 else flat)[0] = value
    in_files(tmp_path, tensors)
    weights = hub_read.open_hub_weights(str(tmp_path), meta_model(config))
    for name in expected:
        stem, file = name.removesuffix(".weight"), 2 if "layers.1." in name else 1
        if stem not in spoilt:
            whole(weights(name))
            continue
        message = rf"{name} with values that are infinite or no numbers \(in model-{file}\.safetensors\)"
        with pytest.raises(UserError, match=message):
            whole(weights(name))


def test_a_weight_that_is_there_twice_is_refused():
    parts, values = MXFP4((4, 64))
    tensors = {f"a{tail}": part for tail, part in parts.items()} | {"a.weight": values}
    with pytest.raises(ValueError, match=r"a\.weight is there twice: plain, and in MXFP4"):
        plain(tensors, {})


def test_rotations_that_lie_in_the_weights_alone_are_read():
    parts, values = MXFP4((4, 64))
    apply = [{"location": "weight_output"}, {"location": "weight_input", "inverse": True}]
    settings = {"transform_config": {"config_groups": {"R1": {"apply": apply}}}}
    found = plain({f"a{tail}": part for tail, part in parts.items()}, settings).tensors["a.weight"]
    assert torch.equal(found[slice(0, 4), slice(0, 64)], values)
