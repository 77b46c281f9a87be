"""Names of stacks of layers: the tensor ``model.layers.0:24:2.x`` holds ``model.layers.0.x``, ``model.layers.2.x``, ….

In the place of a layer's number is a slice in Python's notation, or ``*`` for all layers of the list.
"""

import re

_STACK = re.compile(r"(?<=\.)(?:\*|(\d{1,4}):(\d{1,4})(?::([1-9]\d{0,3}))?)(?=\.)")


def is_stacked(name: str) -> bool:
    return _STACK.search(name) is not None


def numbers_of(name: str) -> range | None:
    """The numbers of the layers in the stack ``name``; None for all layers of the list."""
    found = _STACK.search(name)
    assert found is not None
    start, stop, step = found.groups()
    return None if start is None else range(int(start), int(stop), int(step or 1))


def layer_name(name: str, layer: int) -> str:
    """The name of layer ``layer``'s parameter in the stack ``name``."""
    return _STACK.sub(str(layer), name, count=1)


def layer_names(name: str, count: int) -> list[str]:
    """The names of all layers' parameters in the stack ``name``; ``[name]`` if it is no stack's.

    Raises ValueError if the name has another number of layers than ``count``.
    """
    if not is_stacked(name):
        return [name]
    numbers = numbers_of(name) or range(count)
    if len(numbers) != count:
        raise ValueError(f"{name} has {count} layers")
    return [layer_name(name, layer) for layer in numbers]


def first_name(name: str) -> str:
    """The name of the first layer's parameter in the stack ``name``, or ``name`` if it is no stack's."""
    return layer_name(name, (numbers_of(name) or range(1))[0]) if is_stacked(name) else name
