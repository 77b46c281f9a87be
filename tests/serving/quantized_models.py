"""Small quantized exports of the families that serving engines read, made as a run makes them.

``python -m tests.serving.quantized_models FOLDER`` writes them for :mod:`tests.serving.record_vllm_quantized`. Widths
are whole blocks of 128, since vLLM takes no others of weights that it joins.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.files.arrays import whole
from shardwright.model.facts import facts_of
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import ExportFormat, export
from shardwright.weights.quantize import SCHEMES
from shardwright.weights.weight_sources import seeded_init
from tests.serving.models import FAMILIES, Small
from tests.support import quantized

_HEADS = {"head_dim": 128, "num_attention_heads": 4, "num_key_value_heads": 1}
_WIDTHS = {
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 640,
    "shared_expert_intermediate_size": 896,
    **_HEADS,
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 128),
    # DeepSeek-V3's own, of which kv_a_proj_with_mqa has 576 rows: no whole number of blocks
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def wide(values: Mapping[str, Any]) -> dict[str, Any]:
    """A family's config with widths of whole blocks."""
    found = {name: _WIDTHS.get(name, value) for name, value in values.items()}
    if "kv_lora_rank" in found:
        found["num_key_value_heads"] = found["num_attention_heads"]
    elif "hidden_size" in found and "head_dim" not in found:
        found["hidden_size"] = _HEADS["head_dim"] * _HEADS["num_attention_heads"]
    if "text_config" in found:
        text = wide(found["text_config"])
        found |= {"text_config": text}
        found["vision_config"] = {**found["vision_config"], "out_hidden_size": text["hidden_size"]}
    return found


@dataclass(frozen=True)
class Quantized(Small):
    """A small model of a family, exported in a ``form``: a name of SCHEMES, or of BASES, whose format is kept."""

    form: str = "fp8"

    @property
    def values(self) -> dict[str, Any]:
        return wide(FAMILIES[self.family])

    def export(self, folder: Path) -> None:
        model = facts_of(self.config).whole
        source, quiet = seeded_init(model, 0), Console(quiet=True)
        if self.form in SCHEMES:
            export(folder, model, source, form=ExportFormat(format=self.form), console=quiet)
            return
        schemes, settings = BASES[self.family, self.form]
        base = folder.with_name(f"base of {folder.name}")
        export(base, copy.deepcopy(model), source, form=ExportFormat(format="bf16"))
        quantized.quantize(base, schemes, settings)
        model.config.quantization_config = settings
        opened = open_hub_weights(str(base), copy.deepcopy(model))
        trained = lambda name: whole(opened(name)) * 1.25  # noqa: E731
        export(folder, model, trained, form=ExportFormat(format="same"), console=quiet, base=opened)


def _compressed(form: str, weights: dict[str, Any], ignore: list[str], inputs: Any = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"symmetric": True, **weights}, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "config_groups": {"group_0": {**group, "format": form}},
        "format": form,
        "ignore": ignore,
        "quantization_status": "compressed",
    }


_TOKENS = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}
_NV = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
_LINEAR = quantized.PROJECTIONS.pattern
_EXPERTS = r"\.experts\.\d+\..*weight$"
_ALL_BUT_ROUTERS = r"layers\.[01]\..*\b(\w*proj|w[123])\.weight$"
# (family, name) -> what is quantized, and the settings that such a repository has
BASES: dict[tuple[str, str], tuple[dict[str, quantized.Scheme], dict[str, Any]]] = {
    # deepseek-ai/DeepSeek-V3: all projections, kv_a_proj_with_mqa too
    ("deepseek_v3", "DeepSeek-V3"): (
        {r"layers\.[01]\..*(_proj|_mqa)\.weight$": quantized.fp8_blocks()},
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    # moonshotai/Kimi-K2-Thinking: experts alone
    ("deepseek_v3", "Kimi-K2-Thinking"): (
        {_EXPERTS: quantized.int4},
        {
            **SCHEMES["int4"][0].settings,
            "ignore": [
                *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
                r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
            ],
        },
    ),
    # zai-org/GLM-4.5-FP8: a scale for each row
    ("glm4_moe", "GLM-4.5-FP8"): (
        {_ALL_BUT_ROUTERS: quantized.fp8_rows},
        _compressed(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            ["lm_head", "model.layers.1.mlp.gate"], _TOKENS,
        ),
    ),
    # RedHatAI's: a scale for each row; groups of 16
    ("llama", "FP8-dynamic"): (
        {_LINEAR: quantized.fp8_rows},
        _compressed(
            "float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False},
            ["lm_head"], _TOKENS,
        ),
    ),
    ("llama", "NVFP4A16"): (
        {_LINEAR: quantized.nvfp4(".weight_packed", ".weight_global_scale", divides=True)},
        _compressed("nvfp4-pack-quantized", {**_NV, "dynamic": False}, ["lm_head"]),
    ),
}  # fmt: skip
_HELD_TOGETHER = {"granitemoe", "llama4_text", "gpt_oss"}  # experts in one tensor, of which --format fp8 is refused
_IN_FOUR_BITS = [
    *("llama", "phi3", "mixtral", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "deepseek_v3", "glm4_moe", "minimax_m2"),
]
CASES = [
    *((family, "fp8") for family in FAMILIES if family not in {*_HELD_TOGETHER, "llama, tied", "mistral"}),
    *((family, form) for form in ("mxfp4", "int4") for family in _IN_FOUR_BITS),
    ("gpt_oss", "mxfp4"),
    *BASES,
]


def written(folder: Path, cases: Iterable[tuple[str, str]] = CASES) -> Iterator[str]:
    """Writes them; yields what is written."""
    for family, form in cases:
        Quantized(family, form).export(folder / family / form)
        yield f"{family}, {form}"


if __name__ == "__main__":
    for line in written(Path(sys.argv[1])):
        print(line, flush=True)
