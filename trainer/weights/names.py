"""Names of weights: in files and in a model, several of one parameter, and some of many in a message."""

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

# semi-private: transformers/conversion_mapping.py and transformers/core_model_loading.py, transformers 5.23
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

LISTED = 8  # names in a message


def first_names(names: Iterable[str]) -> str:
    """The first eight of ``names`` in natural order, and the number of the rest."""
    names = sorted(names, key=dot_natural_key)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def first_lines(lines: Sequence[str]) -> str:
    """The first four of ``lines``, and the number of the rest."""
    return "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if lines[4:] else "")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return list(found.values())


class NamesInFiles:
    """transformers' own mapping of the names in checkpoints' files to those of ``model`` (on meta)."""

    def __init__(self, model: PreTrainedModel) -> None:
        mapping = get_model_conversion_mapping(model)
        self._renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        self._converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        self._prefix, self.state = model.base_model_prefix, model.state_dict()
        self.by_pattern = {pattern: each for each in self._converters for pattern in each.source_patterns}

    def become(self, name: str) -> tuple[str, str | None]:
        """The model's name that ``name`` becomes (with others, the first one's), and the pattern of its converter."""
        found, pattern = rename_source_key(name, self._renamings, self._converters, self._prefix, self.state)
        if found not in self.state and name in self.state:  # it has the model's own name already
            return name, None
        return found, pattern

    def know(self, name: str) -> bool:
        """Whether ``name`` becomes a parameter or buffer of the model."""
        return self.become(name)[0] in self.state
