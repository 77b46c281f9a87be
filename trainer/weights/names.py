"""Names of weights: several of one parameter, and some of many in a message."""

from collections import defaultdict
from collections.abc import Iterable

from torch import nn

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import dot_natural_key

LISTED = 8  # names in a message


def first_names(names: Iterable[str]) -> str:
    """The first eight of ``names`` in natural order, and the number of the rest."""
    names = sorted(names, key=dot_natural_key)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return list(found.values())
