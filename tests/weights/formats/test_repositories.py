"""Quantized repositories: a small model of the type of each, in its own format, is read as what it stands for.

``quantization_configs.jsonl`` has the quantization_config of 50 published repositories, as public copies had them in
November 2026, with lists of modules cut short or left out.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, PretrainedConfig

from shardwright.files.arrays import whole
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import tiny_config
from shardwright.weights.hub_read import HubWeights, open_hub_weights
from tests.support import quantized
from tests.support.hub_models import save_theirs
from tests.support.quantized import PROJECTIONS, Scheme

FILE = Path(__file__).parents[2] / "real" / "quantization_configs.jsonl"
ROWS = [json.loads(line) for line in FILE.read_text().splitlines()]
EXPERTS = r"experts\.\d+\.\w+\.weight$"
ALL = PROJECTIONS.pattern
# transformers knows these by no class: the one that their configs otherwise are
NEAREST = {"kimi_k2": "deepseek_v3", "kimi_k3": "kimi_linear", "molmo": "llama"}


# of a config's settings, those that say how weights are stored
SAID = ("quant_method", "quant_algo", "format", "config_groups", "weight_block_size", "load_in_4bit")


def schemes_of(kind: str, settings: dict[str, Any]) -> dict[str, Scheme]:
    """Pattern of names -> how the repository stores those weights, as its config says, and lists of names do."""
    nvfp4 = quantized.nvfp4(".weight", ".weight_scale_2", divides=False)
    method, algorithm = settings.get("quant_method"), settings.get("quant_algo")
    if kind == "deepseek_v4" and method == "fp8":  # its `.scale`, and experts in FP4
        fp4 = quantized.mxfp4(".weight", ".scale", torch.int8, torch.float8_e8m0fnu)
        blocks = quantized.fp8_blocks(".scale", torch.float8_e8m0fnu)
        return {EXPERTS: nvfp4 if algorithm else fp4, ALL: blocks}
    if method == "compressed-tensors":
        forms = [group.get("format") or settings["format"] for group in settings["config_groups"].values()]
        known = {
            "pack-quantized": quantized.int4,
            "mxfp4-pack-quantized": quantized.mxfp4(".weight_packed", ".weight_scale", torch.uint8, torch.uint8),
            "nvfp4-pack-quantized": quantized.nvfp4(".weight_packed", ".weight_global_scale", divides=True),
        }
        groups = [group["weights"] for group in settings["config_groups"].values()]
        known["float-quantized"] = (
            quantized.fp8_blocks(".weight_scale") if groups[0]["strategy"] == "block" else quantized.fp8_rows
        )
        return {EXPERTS: known[forms[-1]], ALL: known[forms[0]]}
    if algorithm == "FP8" or (method == "fp8" and not settings.get("weight_block_size")):
        return {ALL: quantized.fp8_tensor(".weight_scale" if algorithm else ".weight_scale_inv")}
    if algorithm == "MIXED_PRECISION":
        return {r"experts?\.": nvfp4, r"mlp\.": nvfp4, ALL: quantized.fp8_tensor(".weight_scale")}
    if algorithm == "NVFP4":
        return {ALL: nvfp4}
    if method == "bitsandbytes":
        return {ALL: quantized.nf4 if settings["load_in_4bit"] else quantized.int8}
    if method == "mxfp4":
        return {r"experts\.\w+_proj$": quantized.gpt_oss}
    return {ALL: {"fp8": quantized.fp8_blocks(), "fbgemm_fp8": quantized.fp8_rows}[method]}


def opened(folder: Path, kind: str, settings: Any) -> tuple[PretrainedConfig, HubWeights, HubWeights]:
    """A small model's config, its weights as a repository of ``settings`` has them, and what these stand for."""
    config = tiny_config(AutoConfig.for_model(NEAREST.get(kind, kind)).get_text_config().model_type)
    save_theirs(folder, config)
    expected = quantized.quantize(folder, schemes_of(kind, settings) if settings else {}, settings)
    plain = folder / "plain"
    plain.mkdir()
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    referee = open_hub_weights(str(plain), meta_model(config))
    config.quantization_config = settings
    return config, open_hub_weights(str(folder), meta_model(config)), referee


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    """Repository -> model type and settings; one of those that have the same of both."""
    found = {}
    for row in ROWS:
        kind, settings = row["model_type"], row["quantization_config"]
        said = {name: settings.get(name) for name in SAID}
        found.setdefault(json.dumps([kind, said], sort_keys=True), (row["name"], (kind, settings)))
    return dict(found.values())


CASES = cases()


@pytest.mark.parametrize(("kind", "settings"), CASES.values(), ids=CASES)
def test_a_small_model_in_the_repositorys_own_format_is_read(kind, settings, tmp_path):
    _, weights, referee = opened(tmp_path, kind, settings)
    print(weights.said)
    assert len(weights.published.packed) > 3
    for name in weights.group_of:
        assert torch.equal(whole(weights(name)), whole(referee(name))), name
