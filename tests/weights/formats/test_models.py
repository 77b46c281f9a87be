"""Small mixtures of experts in published formats, on the devices, against transformers' own load of the same folder."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    CompressedTensorsConfig,
    FineGrainedFP8Config,
    Mxfp4Config,
)

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.recipe import Mesh
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.place import place_parameters
from shardwright.xla.device_mesh import build_mesh
from tests.support import quantized
from tests.support.hub_models import Placed, save_theirs
from tests.support.jobs import job_of

EXPERTS = {"num_experts_per_tok": 2, "num_hidden_layers": 2, "vocab_size": 256}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 8}
GPT_OSS = {"model_type": "gpt_oss", "hidden_size": 96, "intermediate_size": 64, "num_local_experts": 8}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 128,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 128,
    "kv_lora_rank": 112,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
QWEN = {"model_type": "qwen3_moe", "hidden_size": 64, "moe_intermediate_size": 96, "num_experts": 8, **HEADS}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*gate$"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        }
    },
}
# recipe, config, name pattern -> scheme, the config's settings, transformers' own way to a plain model
MODELS = {
    "gpt_oss in MXFP4": (
        "gpt_oss_ep",
        GPT_OSS | HEADS,
        {r"experts\.\w+_proj$": quantized.gpt_oss},
        {"quant_method": "mxfp4"},
        Mxfp4Config(dequantize=True),
    ),
    "deepseek_v3 in FP8": (
        "deepseek_v3_ep",
        DEEPSEEK,
        {quantized.PROJECTIONS.pattern: quantized.fp8_blocks()},
        {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"},
        FineGrainedFP8Config(dequantize=True),
    ),
    "qwen3_moe in INT4": (
        "qwen3_moe_ep",
        QWEN,
        {quantized.PROJECTIONS.pattern: quantized.int4},
        INT4,
        CompressedTensorsConfig(dequantize=True),
    ),
    "qwen3_moe in NVFP4": (
        "qwen3_moe_ep",
        QWEN,
        {quantized.PROJECTIONS.pattern: quantized.nvfp4(".weight", ".weight_scale_2", divides=False)},
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        None,  # transformers has no reader of ModelOpt's
    ),
}
MESHES = [Mesh(fsdp=-1, expert=4), Mesh(fsdp=-1, expert=8), Mesh(fsdp=-1, expert=1)]


@pytest.mark.parametrize(("recipe", "values", "schemes", "settings", "theirs"), MODELS.values(), ids=MODELS)
def test_every_parameter_on_the_devices_is_that_of_transformers_own_load(
    tmp_path, recipe, values, schemes, settings, theirs
):
    config = AutoConfig.for_model(**EXPERTS, **values)
    save_theirs(tmp_path, config)
    expected = quantized.quantize(tmp_path, schemes, settings)
    if theirs is None:
        referee = plain_model(tmp_path, config, expected)
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            referee = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=theirs, dtype=torch.bfloat16)
    config.quantization_config = settings
    for mesh in MESHES:
        placed = placed_on(recipe, mesh, config, tmp_path)
        for name, parameter in referee.named_parameters():
            found = placed.live(name)
            held = found[tuple(slice(0, size) for size in found.shape)]
            assert torch.equal(held, parameter.float()), (name, mesh)


def plain_model(folder, config, expected):
    plain = folder / "plain"
    config.save_pretrained(plain)
    save_file(expected, plain / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)


def placed_on(recipe, mesh, config, folder):
    recipe = replace(load_recipe(recipe), mesh=mesh)
    job, devices = job_of(recipe, config), build_mesh(mesh)
    weights = open_hub_weights(str(folder), job.model)
    assert weights.said
    model = copy.deepcopy(job.assembled)
    return Placed(model, job.stored, devices, place_parameters(model, job.stored, devices, weights))
