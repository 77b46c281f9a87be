"""Names of stacks: the tensor ``model.layers.*.x`` holds ``model.layers.0.x``, ``model.layers.1.x`` and so on."""

from __future__ import annotations

import re
from collections.abc import Iterator

_STAR = ".*."
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def is_stacked(name: str) -> bool:
    """Whether ``name`` is a stack's."""
    return _STAR in name


def stack_name(layers: str, rest: str) -> str:
    """The name of the stack of ``rest`` in every layer of the list ``layers``."""
    return f"{layers}{_STAR}{rest}"


def layer_name(name: str, layer: int) -> str:
    """The name of one layer's parameter in the stack ``name``. A name that is no stack's is returned as it is."""
    return name.replace(_STAR, f".{layer}.", 1)


def layer_names(name: str, layers: int) -> list[str]:
    """The names of all layers' parameters in the stack ``name``. A name that is no stack's is the only one."""
    return [layer_name(name, layer) for layer in range(layers)] if is_stacked(name) else [name]


def possible_stacks(name: str) -> Iterator[tuple[str, int]]:
    """Each stack that may hold ``name``, and the layer that it would be: ``a.3.b`` may be layer 3 of ``a.*.b``."""
    for number in _NUMBER.finditer(name):
        yield f"{name[: number.start()]}*{name[number.end() :]}", int(number[0])
