"""LoopLoader: the batches of a loop of one's own, on the mesh."""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader
from transformers import BatchEncoding

from shardwright.hosts.hosts import hosts
from shardwright.own_loop.placed_loop import PlacedLoop


class LoopLoader:
    """Batches of ``own`` on the mesh, each of as many rows as the first; what was put together before one runs first.

    A last batch that is shorter is completed with its own rows again, so that nothing is compiled for it; accelerate
    does so with rows of the first (``even_batches``). ``passed`` is told of each batch: how many of its rows are its
    own, and whether it is the last.
    """

    def __init__(self, own: DataLoader[Any], loop: PlacedLoop, passed: Callable[[int, bool], None]) -> None:
        self.own, self._loop, self._passed = own, loop, passed

    def __len__(self) -> int:
        return len(self.own)

    def __iter__(self) -> Iterator[Any]:
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
            placed = self._loop.place(whole)
            self._passed(rows, following is None)
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


def _completed(leaf: Any, held: int, rows: int) -> Any:
    if not isinstance(leaf, Tensor) or not leaf.dim() or len(leaf) != held:
        return leaf
    return leaf[torch.arange(rows) % held]
