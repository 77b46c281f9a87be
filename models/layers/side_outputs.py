"""Values that a layer gives besides its output: router logits for the auxiliary loss, the load of its experts.

There are two channels: ours (:func:`record`), and transformers' output collector, for tensors that a caller asks a
model for, with ``output_router_logits`` and the like. Both are lists that a forward pass appends to. A scanned layer
cannot append to them, because it is traced once for all layers: :func:`collect` makes them return values of the layer,
and :func:`replay` appends them outside.

A layer also has one input besides its arguments: the mask of padding (:func:`real_tokens`).
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

from torch import Tensor

# semi-private: transformers/utils/output_capturing.py, transformers 5.23 (the collector behind `capture_outputs`)
from transformers.utils.output_capturing import _active_collector

from shardwright.models.ops.during import during

_metrics: ContextVar[dict[str, list[Tensor]] | None] = ContextVar("side_metrics", default=None)
_joined: ContextVar[tuple[str, ...]] = ContextVar("joined", default=())
_real: ContextVar[Tensor | None] = ContextVar("real_tokens", default=None)

# channel -> name -> values appended while one layer ran
SideOutputs = dict[str, dict[str, list[Tensor]]]


def record(name: str, value: Tensor) -> None:
    """Report a tensor of this layer, whose gradient is kept; ignored outside :func:`collect_metrics`."""
    if (channel := _metrics.get()) is not None:
        channel.setdefault(name, []).append(value)


def given(real: Tensor | None) -> AbstractContextManager[Any]:
    """Inside, :func:`real_tokens` returns ``real``: [rows, S], 1 for a token and 0 for padding; None: no padding."""
    return during(_real, real)


def real_tokens() -> Tensor | None:
    return _real.get()


def collect_metrics(run: Callable[[], Any]) -> tuple[Any, dict[str, list[Tensor]]]:
    """Run a forward pass. Return its result and the recorded values by name; those of a stack have layers in front."""
    metrics: dict[str, list[Tensor]] = {}
    with during(_metrics, metrics):
        return run(), metrics


def joined(*names: str) -> AbstractContextManager[Any]:
    """Inside, :func:`replay` appends the outputs ``names`` of stacked layers as one tensor, [tokens * layers, …]."""
    # with one tensor a layer the graph of their reader would grow with depth; the load-balancing loss treats rows alike
    return during(_joined, names)


def wanted() -> tuple[str, ...]:
    """The names that transformers' collector asks for now. A traced layer is valid for these names only."""
    return tuple(_active_collector.get() or ())


def collect(run: Callable[[], Any]) -> tuple[Any, SideOutputs]:
    """Run one layer with empty collectors. Return its result and the values that it appended."""
    captured: dict[str, list[Tensor]] = {name: [] for name in wanted()}
    with during(_active_collector, captured):
        result, metrics = collect_metrics(run)
    return result, {"captured": captured, "metrics": metrics}


def replay(sides: Sequence[SideOutputs], count: int) -> None:
    """Append the values of :func:`collect`, for each layer of a period, to the active collectors, in layer order."""
    # with more than one turn tensors are stacked along dimension 0
    captured, metrics = _active_collector.get(), _metrics.get()
    for name in dict.fromkeys(name for side in sides for name in side["captured"] if captured is not None):
        assert captured is not None
        values = [value for side in sides for value in side["captured"].get(name, [])]
        if count == 1:
            captured.setdefault(name, []).extend(values)
        elif name in _joined.get():
            # tokens in front: with layers in front, the merged dimension would lose the tokens' layout
            captured.setdefault(name, []).extend(value.transpose(0, 1).flatten(0, 1) for value in values)
        else:
            turns = zip(*(value.unbind() for value in values), strict=True)
            captured.setdefault(name, []).extend(value for turn in turns for value in turn)
    if metrics is not None:
        for name, values in (pair for side in sides for pair in side["metrics"].items()):
            metrics.setdefault(name, []).extend(values)
