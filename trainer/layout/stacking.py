"""Names of stacked parameters: ``layers.*.x`` holds ``layers.0.x``, ``layers.1.x``, … of all layers in one tensor."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STAR = ".*."
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_stacked(name: str) -> bool:
    """Whether ``name`` is that of a stack of layers."""
    return _STAR in name


def layer_name(name: str, layer: int) -> str:
    """The name of one layer's parameter in the stack ``name``; a name that is not stacked stays as it is."""
    return name.replace(_STAR, f".{layer}.", 1)


def layer_names(name: str, layers: int) -> list[str]:
    """The names of all layers' parameters in the stack ``name``; of a name that is not stacked, that name alone."""
    return [layer_name(name, layer) for layer in range(layers)] if is_stacked(name) else [name]


def possible_stacks(name: str) -> Iterator[tuple[str, int]]:
    """(stack, layer) for each number in ``name`` that may be a layer's: ``a.3.b`` may be layer 3 of ``a.*.b``."""
    for number in _NUMBER.finditer(name):
        yield f"{name[: number.start()]}*{name[number.end() :]}", int(number[0])
