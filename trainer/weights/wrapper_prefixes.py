"""Prefixes that wrappers of a model leave in the names of its weights, recognised and taken off."""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from transformers import PreTrainedModel

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import dot_natural_key

from shardwright.weights.names import NamesInFiles

T = TypeVar("T")
# torch.compile's, FullyShardedDataParallel's and checkpointing's, also of a layer alone: anywhere in a name
INSIDE = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")
# prefix → what stands in its place: these, DistributedDataParallel, Lightning's DeepSpeed, PEFT, the text part of a
# multimodal model
PREFIXES = dict.fromkeys((*INSIDE, "module.", "_forward_module.", "base_model.model."), "")
PREFIXES["model.language_model."] = "model."
_TRIED = 256  # names: of a checkpoint of 90,000 the first tell as much


def without_prefixes(tensors: Mapping[str, T], model: PreTrainedModel) -> tuple[dict[str, T], list[str]]:
    """``tensors`` under the names that they have without wrappers, and the prefixes that went.

    A prefix stays where the names of ``model`` (on meta) have it, where transformers knows a name with it, and where
    no name is known without it. Raises ValueError if two names become one.
    """
    in_files = NamesInFiles(model)
    known, own = in_files.know, list(in_files.state)
    names, gone = {name: name for name in tensors}, []
    while (prefix := _next_prefix(names.values(), own, known)) is not None:
        names = {stored: _without(name, prefix) for stored, name in names.items()}
        gone.append(prefix)
    changed = [name for stored, name in names.items() if name != stored]
    if not any(known(name) for name in _first(changed)):
        return dict(tensors), []
    found: dict[str, str] = {}
    for stored, name in names.items():
        if (twin := found.setdefault(name, stored)) != stored:
            raise ValueError(f"{twin} and {stored} are both {name} without {' and '.join(map(repr, gone))}")
    return {name: tensors[stored] for name, stored in found.items()}, gone


def _next_prefix(names: Iterable[str], own: list[str], known: Callable[[str], bool]) -> str | None:
    names = list(names)
    for prefix in PREFIXES:
        with_it = [name for name in names if _has(name, prefix)]
        if with_it and not any(_has(name, prefix) for name in own) and not any(map(known, _first(with_it))):
            return prefix
    return None


def _has(name: str, prefix: str) -> bool:
    return name.startswith(prefix) or (prefix in INSIDE and f".{prefix}" in name)


def _without(name: str, prefix: str) -> str:
    if not _has(name, prefix):
        return name
    return name.replace(prefix, "") if prefix in INSIDE else PREFIXES[prefix] + name.removeprefix(prefix)


def _first(names: Iterable[str]) -> list[str]:
    return list(itertools.islice(sorted(names, key=dot_natural_key), _TRIED))
