"""LoopLoader: the batches of a loop of one's own, on the mesh."""

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from shardwright.hosts.hosts import hosts
from shardwright.models.ops.labels import IGNORE
from shardwright.own_loop.placed_loop import PlacedLoop


@dataclass
class Pass:
    """A pass through a loader: of the batch it gave last, how many rows are its own, and whether it ends the pass."""

    rows: int = 0
    last: bool = False


class LoopLoader:
    """Batches of ``own`` on the mesh, each of as many rows as the first; what was put together before one runs first.

    A last batch that is shorter is completed with its own rows again, so that nothing is compiled for it; accelerate
    does so with rows of the first (``even_batches``). The model's own loss does not score them. A pass is the last of
    ``passes`` while it goes on.
    """

    def __init__(self, own: DataLoader[Any], loop: PlacedLoop, passes: list[Pass]) -> None:
        self.own, self._loop, self._passes = own, loop, passes

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Any]:
        self._passes.append(this := Pass())
        try:
            yield from self._batches(this)
        finally:  # also where a loop breaks off: a loop around it is in its own pass again
            self._passes[:] = [each for each in self._passes if each is not this]

    def _batches(self, this: Pass) -> Iterator[Any]:
        batches = iter(self.own)
        batch = next(batches, None)
        most = _rows(batch)
        if hosts().several:
            tensors = [leaf for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor)]
            sums = ", ".join(f"{list(leaf.shape)} {leaf.double().sum().item()}" for leaf in tensors)
            hosts().check_same({"first batch of a loader (set_seed(…) before it makes them the same)": sums})
        while batch is not None:
            following = next(batches, None)
            rows = _rows(batch)
            whole = _plain(batch)
            if rows != most:
                whole = tree_map(functools.partial(_completed, held=rows, rows=most), whole)
            if self._loop.step is not None:
                self._loop.step.settle()
            placed = _place(self._loop, whole, rows)
            this.rows, this.last = rows, following is None
            yield BatchEncoding(placed) if isinstance(batch, BatchEncoding) else placed
            batch = following

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.own, name)


def _plain(batch: Any) -> Any:
    """``batch``, a mapping as a dict: torch's trees know no others."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _rows(batch: Any) -> int:
    return next((len(leaf) for leaf in tree_leaves(_plain(batch)) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def _place(loop: PlacedLoop, batch: Any, rows: int) -> Any:
    """``batch`` on the mesh; its labels know which of them the model's own loss scores: those of the first ``rows``.

    Every batch's do, a whole one's too, so that all have one program.
    """
    labels = batch.get("labels") if isinstance(batch, dict) else None
    if not isinstance(labels, Tensor) or labels.dim() != 2:
        return loop.place(batch)
    scored = labels.clone()
    scored[rows:] = IGNORE
    placed = loop.place({**batch, "scored": scored})
    placed["labels"].scored = placed.pop("scored")
    return placed


def _completed(leaf: Any, held: int, rows: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != held:
        return leaf
    return leaf[torch.arange(rows) % held]
