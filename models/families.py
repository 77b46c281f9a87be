"""What a family needs beyond its own structure, which is all that the rest knows: one entry each."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from models.experts import scaled

# class of a module → what is done to it once, in place, when its model is made
ENTRIES: dict[str, Callable[[nn.Module], None]] = {
    "Llama4TextMoe": scaled.route,
}


def adapt(model: nn.Module) -> None:
    """Apply the entries to ``model``. Its parameters keep their names and shapes, and its results their values."""
    for module in list(model.modules()):
        if entry := ENTRIES.get(type(module).__name__):
            entry(module)
