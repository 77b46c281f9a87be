"""What a layer wants to say besides its output: router logits for the auxiliary loss, a dropped-token fraction.

Two channels exist. Ours (:func:`record`) carries metrics; transformers' own output collector carries the tensors that
models ask for by ``output_router_logits`` and the like. Both are lists that a forward pass appends to, which a scanned
layer can't do: it is traced once for all layers. :func:`collect` turns both into plain return values of the layer, and
:func:`replay` appends them again outside, layer by layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

# Semi-private: the collector behind transformers' `capture_outputs` (transformers/utils/output_capturing.py, 5.23).
from transformers.utils.output_capturing import _active_collector

_metrics: ContextVar[dict[str, list[torch.Tensor]] | None] = ContextVar("side_metrics", default=None)

_joined: ContextVar[tuple[str, ...]] = ContextVar("joined", default=())

# channel -> name -> what was appended while one layer ran
SideOutputs = dict[str, dict[str, list[torch.Tensor]]]


def record(name: str, value: torch.Tensor) -> None:
    """Report a scalar metric of this layer, if anyone listens (see :func:`collect_metrics`)."""
    channel = _metrics.get()
    if channel is not None:
        channel.setdefault(name, []).append(value.detach().flatten())


def collect_metrics(run: Callable[[], Any]) -> tuple[Any, dict[str, list[torch.Tensor]]]:
    """Run a forward pass; returns its result and every metric that its layers recorded, in order."""
    metrics: dict[str, list[torch.Tensor]] = {}
    token = _metrics.set(metrics)
    try:
        return run(), metrics
    finally:
        _metrics.reset(token)


@contextlib.contextmanager
def joined(*names: str) -> Iterator[None]:
    """Inside, stacked layers say these as one tensor, [tokens * layers, …], not one each: a graph of one size at any
    depth, for a reader that takes them all alike (the load-balancing loss)."""
    token = _joined.set(names)
    try:
        yield
    finally:
        _joined.reset(token)


def wanted() -> tuple[str, ...]:
    """The names that transformers' collector asks for now; part of what a traced layer depends on."""
    return tuple(_active_collector.get() or ())


def collect(run: Callable[[], Any]) -> tuple[Any, SideOutputs]:
    """Run one layer with empty collectors in place of the active ones; returns its result and what it appended."""
    captured: dict[str, list[torch.Tensor]] = {name: [] for name in wanted()}
    token = _active_collector.set(captured)
    try:
        result, metrics = collect_metrics(run)
    finally:
        _active_collector.reset(token)
    return result, {"captured": captured, "metrics": metrics}


def replay(side: SideOutputs, count: int | None) -> None:
    """Append what the layers said to the active collectors, in layer order.

    Args:
        count: layers whose tensors are stacked along dimension 0; None: one layer's, as they are.
    """
    captured, metrics = _active_collector.get(), _metrics.get()
    for name, values in side["captured"].items():
        for value in values:
            if captured is None:
                continue
            if count is None:
                captured.setdefault(name, []).append(value)
            elif name in _joined.get():
                # tokens first: merged behind layers, they would lose their layout
                captured.setdefault(name, []).append(value.transpose(0, 1).flatten(0, 1))
            else:
                captured.setdefault(name, []).extend(value.unbind())
    for name, values in side["metrics"].items():
        if metrics is not None:
            metrics.setdefault(name, []).extend(value.flatten() for value in values)
