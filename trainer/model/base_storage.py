"""The storage of the frozen weights under an adapter: `--base_dtype`, and a config's word on a quantized checkpoint."""

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
    if method == "fp8" and list(settings.get("weight_block_size") or ()) == [128, 128]:
        return "fp8"
    if method == "bitsandbytes" and settings.get("load_in_4bit") and settings.get("bnb_4bit_quant_type") == "nf4":
        return "nf4"
    groups = [group.get("weights") or {} for group in (settings.get("config_groups") or {}).values()]
    kinds = {(group.get("type"), group.get("num_bits"), group.get("strategy")) for group in groups}
    return "fp8_rows" if method == "compressed-tensors" and kinds == {("float", 8, "channel")} else None


def packed_among(names: Collection[str], base_dtype: str, facts: ModelFacts) -> list[str]:
    """Select of the weights ``names`` those that ``base_dtype`` packs: all, or for :data:`SAME` the quantized ones."""
    if base_dtype != SAME:
        return list(names)
    settings = quantization_settings(facts.config)
    left = [str(word) for key in _LEFT_ALONE for word in settings.get(key) or ()]
    found = []
    for name in names:
        known = {name, facts.names_in_whole.get(name, name)}
        if all(should_convert_module(full.removesuffix(".weight"), left) for full in known):
            found.append(name)
    return found


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
