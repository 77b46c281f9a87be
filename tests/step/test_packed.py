"""A frozen model in fewer bits: its numbers are those of the plain model with the rounded weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from shardwright.errors import UserError
from shardwright.files.arrays import whole
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.base_storage import published
from shardwright.model.lora_options import stored_said
from shardwright.models.adapters.lora import base_of
from shardwright.models.adapters.packings.registry import PACKINGS, SCALE
from shardwright.models.experts import unpacking
from shardwright.models.layers.decoder_layers import DecoderLayers
from shardwright.models.ops import kernel_cost
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.packed_source import packed_source
from shardwright.weights.weight_sources import state_dict_weights
from tests.step.test_adapters import check_gradients
from tests.support import quantized
from tests.support.adapters import make_adapted
from tests.support.cases import PLAIN_LAYERS, make_batch, reference_loss, small_config
from tests.support.hub_models import save_theirs
from tests.support.jobs import job_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21.2
# the inputs that a device has of each weight are whole groups of 4-bit codes
WIDE = {"hidden_size": 256, "intermediate_size": 256}
WHOLE = slice(None)


@pytest.mark.parametrize(
    ("base_dtype", "recipe", "changes", "compute"),
    [
        # experts whose weights are gathered as codes
        ("int8", "mixtral_ep", {"num_hidden_layers": 1}, {"experts": "capacity", "scan": False}),
        (
            "fp8",
            "gpt_oss_ep",
            {"num_hidden_layers": 1},
            {"scan": False},
        ),  # weights stored the other way round, and biases
        ("mxfp4", "gpt_oss_ep", {**WIDE, "head_dim": 64, "num_hidden_layers": 1}, {}),
        ("nf4", "mixtral_ep_tp", WIDE, {}),  # dropless experts, gathered as codes too
        ("int4_zeros", "llama_tp", WIDE, {}),
        ("nvfp4", "mixtral_ep", {**WIDE, "num_hidden_layers": 1}, {}),  # whose experts get their rows in 4 rounds
    ],
    ids=str,
)
def test_loss_and_gradients_are_pefts_on_the_rounded_model(base_dtype, recipe, changes, compute, monkeypatch):
    monkeypatch.setattr(unpacking, "MOST_BYTES", 1)  # a device's two experts are unpacked one after the other
    if base_dtype == "nvfp4":
        monkeypatch.setattr(kernel_cost, "buffer_bytes", lambda _: 2**16)
    adapted = make_adapted(recipe, options={"base_dtype": base_dtype}, changes=changes, **compute)
    check_gradients(adapted)
    assert any(values.dtype == PACKINGS[base_dtype].code_dtype for values in adapted.case.parameters().values())
    layers = [module for module in adapted.case.model.modules() if isinstance(module, DecoderLayers)]
    for run in (run for each in layers for run in each.runs):
        for traced in (traced for turn in run.graphs.values() for traced in turn):
            # the backward unpacks again: of a layer only its inputs are kept, the codes among them
            assert traced.stage.graph.saved == len(traced.stage.graph.aliases) > 0


def test_the_model_is_evaluated_as_it_is_trained():
    changes = {**WIDE, "num_hidden_layers": 1}
    adapted = make_adapted("llama_tp", options={"base_dtype": "mxfp4"}, changes=changes, **PLAIN_LAYERS)
    batch = make_batch(adapted.case.config)
    with torch.no_grad():
        expected = reference_loss(adapted.peft, batch, router_loss=False).item()
    assert adapted.case.evaluation([batch]).loss == pytest.approx(expected, rel=1e-5)


def test_linear_layers_and_experts_are_codes_with_scales_and_all_else_is_bfloat16():
    job = job_of("mixtral_ep", lora_r=4, base_dtype="int8")
    found = {entry.name: entry for entry in job.stored.parameters}
    integers = {name for name, entry in found.items() if entry.dtype == torch.int8}
    scales = {name for name in found if name.endswith(SCALE)}
    assert {name + SCALE for name in integers} == scales
    assert {name.rpartition(".*.")[2] for name in integers} == {
        *(f"self_attn.{p}_proj.weight" for p in "qkvo"),
        "mlp.experts.gate_up_proj",
        "mlp.experts.down_proj",
    }
    others = [e for n, e in found.items() if n not in integers | scales and base_of(n) is None]
    assert {entry.dtype for entry in others} == {torch.bfloat16}
    assert not any(found[name].trained for name in integers | scales)
    down = found["model.layers.*.mlp.experts.down_proj"]
    assert down.bytes_per_device == torch.tensor(down.local_shape).prod().item()
    assert found[down.name + SCALE].shape == (*down.shape[:-1], 1)
    assert 2 not in {
        s.dim - 1 for s in found[down.name + SCALE].layout.values()
    }  # the last dimension has no more parts


@pytest.mark.parametrize(
    ("base_dtype", "bits"),
    [("fp8", 8.125), ("int4", 4.5), ("int4_zeros", 5), ("mxfp4", 4.25), ("nf4", 4.5), ("nvfp4", 6)],
)
def test_a_device_holds_as_many_bits_as_are_stated(base_dtype, bits):
    config = small_config(load_recipe("gpt_oss_ep"), **WIDE, head_dim=128)
    plan = job_of("gpt_oss_ep", config, lora_r=4, base_dtype=base_dtype).plan
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes, scale = plan[name], plan[name + SCALE]
    weight = codes.packed.used
    assert 8 * (codes.bytes_per_device + scale.bytes_per_device) / torch.tensor(weight.local_shape).prod() <= bits
    assert codes.layout == weight.layout  # the line's: experts, and the outputs
    assert scale.layout == weight.layout


def test_a_mesh_that_cuts_through_packed_inputs_is_refused_and_told_what_to_write():
    with pytest.raises(
        UserError, match=r"(?s)o_proj.weight in MXFP4.*64 numbers, 16 a device.*32 of them.*divide 2.*int8"
    ):
        job_of("llama_tp", small_config(load_recipe("llama_tp")), lora_r=4, base_dtype="mxfp4")


def test_same_is_the_checkpoints_own_packing_of_its_own_weights(tmp_path: Path):
    config = job_of("gpt_oss_ep").config.to_dict()
    left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": left}  # openai/gpt-oss-20b's
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = job_of("gpt_oss_ep", AutoConfig.from_pretrained(tmp_path), lora_r=4, base_dtype="same")
    packed = {entry.name for entry in job.plan.parameters if entry.packed is not None}
    assert {name.rpartition(".")[2] for name in packed} == {"gate_up_proj", "down_proj"}
    assert {job.plan[name].packed.packing for name in packed} == {PACKINGS["mxfp4"]}
    said = (
        "in MXFP4 as published, but read and packed again: the same values (4.25 bits a weight), all else in bfloat16"
    )
    assert stored_said(job.facts, job.plan, job.args) == said
    with pytest.raises(UserError, match="a checkpoint that is plain"):
        job_of("gpt_oss_ep", lora_r=4, base_dtype="same")


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4_zeros"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True}, None),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, None),
        ({"quant_method": "awq", "bits": 4, "group_size": 16}, None),
        ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, None),
    ],
    ids=str,
)
def test_a_config_tells_whether_there_is_a_packing_of_its_weights(settings, word):
    assert published(settings) == word


def groups(kind: str, bits: int, strategy: str, **more: Any) -> dict[str, Any]:
    weights = {"type": kind, "num_bits": bits, "strategy": strategy, "symmetric": True, **more}
    left = ["lm_head", r"re:.*self_attn.*", r"re:.*\.mlp\.gate$"]  # moonshotai/Kimi-K2.5 and K3 leave these alone
    return {
        "quant_method": "compressed-tensors",
        "ignore": left,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


LEFT = {"modules_to_not_convert": ["lm_head", ".*self_attn", ".*mlp.gate"]}
# the packing, the scheme of a checkpoint's experts, and its quantization_config
PUBLISHED = {
    "INT4, Kimi-K2.5": ("int4", quantized.int4, groups("int", 4, "group", group_size=32)),
    "MXFP4, Kimi-K3": (
        "mxfp4",
        quantized.mxfp4(".weight_packed", ".weight_scale", torch.uint8, torch.uint8),
        groups("float", 4, "group", group_size=32),
    ),
    "FP8 in blocks, Laguna": (
        "fp8",
        quantized.fp8_blocks(".weight_scale"),
        groups("float", 8, "block", block_structure=[128, 128]),
    ),
    "FP8 in rows, Llama-4": ("fp8_rows", quantized.fp8_rows, groups("float", 8, "channel")),
    "FP8 with one scale": ("fp8_rows", quantized.fp8_tensor(".weight_scale"), groups("float", 8, "tensor")),
    "NVFP4 of ModelOpt": (
        "nvfp4",
        quantized.nvfp4(".weight", ".weight_scale_2", divides=False),
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "*.self_attn*", "model.layers.0.mlp.gate"],
        },
    ),
    "NVFP4 of compressed-tensors": (
        "nvfp4",
        quantized.nvfp4(".weight_packed", ".weight_global_scale", divides=True),
        groups("float", 4, "tensor_group", group_size=16),
    ),
    "GPTQ": ("int4_zeros", quantized.gptq, {"quant_method": "gptq", "bits": 4, "group_size": 64, **LEFT}),
    "AWQ": ("int4_zeros", quantized.awq, {"quant_method": "awq", "bits": 4, "group_size": 64, **LEFT}),
    "int8 of bitsandbytes": (
        "int8",
        quantized.int8,
        {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": [".*self_attn", "gate"]},
    ),
}


@pytest.mark.parametrize(("word", "scheme", "settings"), PUBLISHED.values(), ids=PUBLISHED)
def test_what_is_packed_as_published_has_the_published_values_and_all_else_is_left_alone(
    tmp_path: Path, word, scheme, settings
):
    sizes = {"hidden_size": 192, "moe_intermediate_size": 320}  # more than a block of 128, and no multiple of it
    config = AutoConfig.for_model("qwen3_moe", **sizes, num_hidden_layers=1, num_experts=8, vocab_size=256)
    config.num_attention_heads, config.num_key_value_heads, config.head_dim = 8, 8, 8
    save_theirs(tmp_path, config)
    quantized.quantize(tmp_path, {r"experts\.\d": scheme}, settings)
    config.quantization_config = settings
    job = job_of("qwen3_moe_ep", config, lora_r=4, base_dtype="same")
    found = {entry.name: entry.packed for entry in job.plan.parameters if entry.packed}
    assert {name.rpartition(".mlp.")[2] for name in found} == {"experts.gate_up_proj", "experts.down_proj"}
    assert {how.packing for how in found.values()} == {PACKINGS[word]}
    expected = open_hub_weights(str(tmp_path), job.model)
    source = packed_source(open_hub_weights(str(tmp_path), job.model, packed=job.packed_as_published), job.plan)
    for name, how in found.items():
        values = how.packing.unpack(whole(source(name)), whole(source(name + SCALE)), how.weight, torch.bfloat16)
        off = values != whole(expected(name))
        assert off.float().mean() < (1e-3 if word == "int8" else 1e-9)  # bitsandbytes' scale is a product of two
    with pytest.raises(UserError, match=r"1 tensors that are not quantized, and are by its config: .*q_proj"):
        open_hub_weights(str(tmp_path), job.model, packed=["model.layers.0.self_attn.q_proj.weight"])


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_weight_that_is_no_finite_number_is_refused_by_name(value):
    plan = job_of("llama_fsdp", lora_r=4, base_dtype="int8").stored
    name = "model.layers.1.mlp.up_proj.weight"
    weight = torch.ones(128, 64)
    weight[3, 5] = value
    with pytest.raises(UserError, match=f"{name} in int8"):
        _ = packed_source(state_dict_weights({name: weight}), plan)(name)[slice(0, 128), slice(0, 64)]


class Counted:
    """An array of ones that counts how often it is read."""

    dtype = torch.float32

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape, self.reads = shape, 0

    def __getitem__(self, where):
        self.reads += 1
        return torch.ones(1).expand(self.shape)[where]


def test_each_row_is_read_once_whatever_devices_hold_of_it():
    name, plan = "model.layers.0.mlp.experts.down_proj", job_of("mixtral_ep", lora_r=4, base_dtype="int8").stored
    (how,) = (e.packed for e in plan.parameters if e.packed and name in plan.members(e.name))
    experts, rows, columns = how.weight.shape
    array = Counted(how.weight.shape)
    source = packed_source(lambda _: array, plan)
    for half in (slice(0, columns // 2), slice(columns // 2, columns)):
        for expert in range(experts):
            codes = source(name)[slice(expert, expert + 1), WHOLE, half]
            assert torch.equal(codes, torch.full((1, rows, columns // 2), 127, dtype=torch.int8))
    for expert in range(experts):
        scale = source(name + SCALE)[slice(expert, expert + 1), WHOLE, slice(0, 1)]
        assert torch.allclose(scale, torch.full((1, rows, 1), 1 / 127))
    assert array.reads == experts
