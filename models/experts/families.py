"""Families whose experts need more than their structure: one entry a line, by the name of a class of transformers'."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from shardwright.models.experts import loops, scaled
from torch import nn

# class of a block with experts → what puts these under transformers' experts interface, or makes their shapes static
EXPERTS: dict[str, Callable[[nn.Module], None]] = {
    "Llama4TextMoe": scaled.route,
    "DbrxExperts": partial(scaled.swap_methods, mixin=loops.Glu),
    "JetMoeParallelExperts": partial(scaled.swap_methods, mixin=loops.RowsProducts),
    "JetMoeTopKGating": partial(scaled.swap_methods, mixin=loops.Rows),
    "LongcatFlashExperts": partial(scaled.swap_methods, mixin=loops.SomeIdentity),
}


def adapt(model: nn.Module) -> None:
    """Make all experts of ``model`` such as XLA can run. Parameters keep names and shapes, results their values."""
    for module in list(model.modules()):
        if entry := EXPERTS.get(type(module).__name__):
            entry(module)
