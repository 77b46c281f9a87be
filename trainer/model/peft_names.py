"""The modules and parameters that a `LoraConfig`'s fields mean, by PEFT's own rules (peft 0.21.2, tuners_utils.py)."""

import re
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from transformers import PreTrainedModel

from shardwright.model.adapted_weights import ALL, inner_weights, means
from shardwright.models.adapters.peft_families import renamed
from shardwright.models.experts.expert_families import experts_modules


def converted(values: Mapping[str, Any], model: PreTrainedModel) -> dict[str, Any]:
    """The fields as PEFT changes them for ``model``, where it takes linear layers' names for fused experts.

    Gate and up are one parameter then, whose factors have twice the rank and twice the alpha. Raises ValueError for a
    name of one of them without the other.
    """
    found, old = dict(values), renamed(str(model.config.model_type))
    modules = values["target_modules"]
    if not old or not modules:
        return found
    names = _last_words(values, model, old) if isinstance(modules, str) else set(modules)
    if not names:
        return found
    changed = {name: new for name in names for word, new in old.items() if f".{name}".endswith(f".{word}")}
    parameters = {*(values.get("target_parameters") or []), *changed.values()}
    found |= {"target_modules": sorted(names - changed.keys()), "target_parameters": sorted(parameters)}
    pair = [word for word, new in old.items() if new == "gate_up_proj"]
    there = {word for word in pair for name in changed if f".{name}".endswith(f".{word}")}
    if len(there) == 1:
        raise ValueError(f"target_modules has {there.pop()}, one of {' and '.join(pair)}, which are one weight")
    if there:
        key = r".*\.gate_up_proj"
        for field, value in (("rank_pattern", values["r"]), ("alpha_pattern", values["lora_alpha"])):
            found[field] = {**(values.get(field) or {}), key: len(pair) * value}
    return found


def _last_words(values: Mapping[str, Any], model: PreTrainedModel, old: Mapping[str, str]) -> set[str]:
    """The last words of all names that a text in ``target_modules`` means, also of experts as they once were."""
    if values["target_modules"] == ALL:
        return {name.removesuffix(".weight").rpartition(".")[2] for name in _linear(model)} | old.keys()
    parameters = [name for name, _ in model.named_parameters()]
    found = {
        name.rpartition(".")[2]
        for name in [*(n for n, _ in model.named_modules()), *parameters]
        if is_target(values, name)
    }
    for name in parameters:
        owner, _, last = name.rpartition(".")
        found |= {word for word, new in old.items() if new == last and is_target(values, f"{owner}.{word}")}
    return found


def _linear(model: PreTrainedModel) -> list[str]:
    """The weights of linear layers that PEFT's "all-linear" means."""
    experts = experts_modules(model)
    return [name for name in inner_weights(model) if name.rpartition(".")[0] not in experts]


def is_target(values: Mapping[str, Any], name: str) -> bool:
    """Whether the fields choose the module ``name``."""
    if is_excluded(values.get("exclude_modules"), name):
        return False
    if any(re.match(rf"(^|.*\.){word}($|\..*)", name) for word in values.get("modules_to_save") or ()):
        return False
    modules = values["target_modules"]
    if isinstance(modules, str) or not means(modules, name):
        return means(modules, name)
    return name in modules or in_layers(values.get("layers_to_transform"), values.get("layers_pattern"), name)


def is_excluded(words: str | Collection[str] | None, name: str) -> bool:
    return bool(words) and means(words, name)  # type: ignore[arg-type]


def in_layers(layers: Any, pattern: str | Collection[str] | None, name: str) -> bool:
    """Whether the module ``name`` is in one of ``layers``: a number, or several; None or none at all: any."""
    if layers is None or layers == []:
        return True
    lists = [pattern] if isinstance(pattern, str) else pattern or []
    expressions = [rf"(?:^|.*?\.){word}\.(\d+)\." for word in lists] or [r".*?\.[^.]*\.(\d+)\."]
    found = next(filter(None, (re.match(expression, name) for expression in expressions)), None)
    return found is not None and int(found[1]) in ([layers] if isinstance(layers, int) else layers)


def chosen_modules(values: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The names of the modules that the fields choose."""
    if values["target_modules"] == ALL:
        linear = [name.removesuffix(".weight") for name in _linear(model)]
        values = {**values, "target_modules": linear}
    return [name for name, _ in model.named_modules() if name and is_target(values, name)]


def chosen_parameters(values: Mapping[str, Any], model: PreTrainedModel) -> list[str]:
    """The names of the parameters that the fields choose by themselves."""
    words = values.get("target_parameters") or []
    return [name for name, _ in model.named_parameters() if means(words, name)]


def saved_modules(words: Iterable[str], model: PreTrainedModel) -> list[str]:
    """The names of the modules that are trained and saved whole: those whose name ends in one of ``words``."""
    words = tuple(words)
    return [name for name, _ in model.named_modules(remove_duplicate=False) if name and name.endswith(words)]


def pattern_value(pattern: Mapping[str, Any] | None, name: str, default: Any) -> Any:
    """The value of the first expression in ``pattern`` that the end of ``name`` is, else ``default``."""
    for key, value in (pattern or {}).items():
        if re.match(rf"(.*\.)?({key})$", name):
            return value
    return default
