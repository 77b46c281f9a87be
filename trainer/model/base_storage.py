"""The storage of the frozen weights under an adapter: `--base_dtype`, and a config's word on a quantized checkpoint."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from transformers import PretrainedConfig

# semi-private: transformers/quantizers/quantizers_utils.py, transformers 5.23
from transformers.quantizers.quantizers_utils import should_convert_module

from shardwright.arguments.adapter_options import SAME
from shardwright.errors import UserError
from shardwright.layout.plan import ShardingPlan
from shardwright.model.facts import ModelFacts
from shardwright.models.adapters.packings.registry import PACKINGS, Packing, Weight

# the lists of modules that a quantization_config leaves alone, by their names in several methods' configs
_LEFT_ALONE = ("modules_to_not_convert", "llm_int8_skip_modules", "ignore")


def quantization_settings(config: PretrainedConfig) -> Mapping[str, Any]:
    """The quantization_config of ``config`` or of its text part as plain values; {} if it has none."""
    for part in (config, config.get_text_config()):
        settings = getattr(part, "quantization_config", None)
        if settings:
            return settings if isinstance(settings, Mapping) else dict(settings.to_dict())
    return {}


def packing_of(base_dtype: str, config: PretrainedConfig) -> Packing | None:
    """The packing that ``base_dtype`` means; None: weights lie in the dtype of that name.

    Raises UserError if it is :data:`SAME`, and the checkpoint is quantized in no packing that there is.
    """
    if base_dtype != SAME:
        return PACKINGS.get(base_dtype)
    settings = quantization_settings(config)
    word = published(settings)
    if word is None:
        method = settings.get("quant_method") or settings.get("quant_algo")
        raise UserError(
            asked=f"--base_dtype {SAME}",
            found=f"a checkpoint quantized by {method!r}, in another packing"
            if method
            else "a checkpoint that is plain, or whose config.json has no quantization_config",
            why=f"frozen weights are packed as {', '.join(PACKINGS)} alone",
            instead="--base_dtype bfloat16, the default, or one of these",
        )
    return PACKINGS[word]


def published(settings: Mapping[str, Any]) -> str | None:
    """The word of the packing that a quantization_config describes; None: it is none of ours."""
    method = settings.get("quant_method")
    if method == "mxfp4":
        return "mxfp4"
    if method in ("fp8", "fbgemm_fp8") and not settings.get("quant_algo"):
        block = settings.get("weight_block_size")
        return "fp8_rows" if not block else "fp8" if list(block) == [128, 128] else None
    if settings.get("quant_algo") in ("FP8", "NVFP4"):  # ModelOpt's
        return "fp8_rows" if settings["quant_algo"] == "FP8" else "nvfp4"
    if method == "bitsandbytes" and settings.get("load_in_8bit"):
        return "int8"
    if method == "bitsandbytes" and settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    if method in ("gptq", "awq"):
        size = settings.get("group_size") or 0
        in_blocks = size == -1 or (size > 0 and size % 32 == 0)
        others = settings.get("desc_act") or settings.get("dynamic")  # groups of no neighbours, other bits for some
        return "int4_zeros" if settings.get("bits") == 4 and in_blocks and not others else None
    if method != "compressed-tensors":
        return None
    found = {_published_group(group) for group in (settings.get("config_groups") or {}).values()}
    return found.pop() if len(found) == 1 else None


def _published_group(group: Mapping[str, Any]) -> str | None:
    """The word of the packing of a group of compressed-tensors; None: none of ours, or not all linear layers'."""
    weights = group.get("weights") or {}
    if group.get("targets") != ["Linear"] or weights.get("actorder") or not weights.get("symmetric", True):
        return None
    size = weights.get("group_size") or 0
    match weights.get("type"), weights.get("num_bits"), weights.get("strategy"):
        case "float", 8, "channel" | "tensor":  # a row's scale holds one for all as well
            return "fp8_rows"
        case "float", 8, "block" if list(weights.get("block_structure") or ()) == [128, 128]:
            return "fp8"
        case "float", 4, "group" if size == 32:
            return "mxfp4"
        case "float", 4, "tensor_group" if size == 16:
            return "nvfp4"
        case "int", 8, "channel":
            return "int8"
        case "int", 4, "group" if size > 0 and size % 32 == 0:
            return "int4"
    return None


def packed_among(names: Collection[str], base_dtype: str, facts: ModelFacts) -> list[str]:
    """Select of the weights ``names`` those that ``base_dtype`` packs: all, or for :data:`SAME` the quantized ones."""
    if base_dtype != SAME:
        return list(names)
    settings = quantization_settings(facts.config)
    words = [str(word) for key in _LEFT_ALONE for word in settings.get(key) or ()]
    # compressed-tensors marks its expressions so (utils/match.py)
    expressions = [word.removeprefix("re:") for word in words if word.startswith("re:")]
    left = [word for word in words if not word.startswith("re:")]
    if settings.get("quant_method") == "modelopt":  # which lists file patterns, where the others have expressions
        left = [re.escape(word).replace(r"\*", ".*") for word in left]

    def is_packed(module: str) -> bool:
        return should_convert_module(module, left) and not any(re.match(each, module) for each in expressions)

    known = {name: {name, facts.names_in_whole.get(name, name)} for name in names}
    return [name for name in names if all(is_packed(full.removesuffix(".weight")) for full in known[name])]


def said(base_dtype: str, plan: ShardingPlan, facts: ModelFacts, names: Collection[str]) -> str:
    """The frozen model's storage in words; ``names``: the weights that could be packed."""
    packing = packing_of(base_dtype, facts.config)
    if packing is None:
        return f"in {base_dtype}"
    kept = [name for name in packed_among(names, base_dtype, facts) if plan[name].packed is None]
    again = f"in {packing.title} as published, but read and packed again: {packing.again}"
    how = again if base_dtype == SAME else f"quantized to {packing.title} at load"
    text = f"{how} ({packing.bits:g} bits a weight), all else in bfloat16"
    if not kept:
        return text
    why = packing.lacking(Weight(plan[kept[0]].shape)) or "it is tied"
    return f"{text}; so are {len(kept)} weights that it can't hold, such as {kept[0]}: {why}"
