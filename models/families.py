"""What single families need beyond their structure: one entry a line, by the name of a class of transformers'."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from models.block_indexer import chosen_keys
from models.experts import scaled

# class of a module → the forward that it has under our attention: its own numbers, in a way that XLA can run
FORWARDS: dict[str, Callable[..., Any]] = {
    "Qwen4ExpTextQSAIndexer": chosen_keys,
}
# class of a block with experts → what puts these under transformers' experts interface, in place
EXPERTS: dict[str, Callable[[nn.Module], None]] = {
    "Llama4TextMoe": scaled.route,
}


def adapt(model: nn.Module) -> None:
    """Put all experts of ``model`` under the interface. Parameters keep names and shapes, results their values."""
    for module in list(model.modules()):
        if entry := EXPERTS.get(type(module).__name__):
            entry(module)
