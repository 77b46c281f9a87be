"""The arguments of a run's layers, sorted by how they reach a layer.

One may be a mapping of keys and values that a layer stores for later layers, which the decoder hands to all of them. It
is registered here as a pytree, so that its entries count as tensors of a layer's arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# semi-private: torch/utils/_pytree.py, torch 2.9; transformers/cache_utils.py, transformers 5.23
from torch.utils._pytree import MappingKey, keystr, register_pytree_node, tree_flatten_with_path, tree_leaves
from transformers.cache_utils import KVSharingDict

register_pytree_node(
    KVSharingDict,
    lambda shared: (list(shared.values()), list(shared)),
    lambda values, keys: KVSharingDict(zip(keys, values, strict=True)),
    flatten_with_keys_fn=lambda shared: ([(MappingKey(key), value) for key, value in shared.items()], list(shared)),
)


def shared_in(*given: Any) -> list[KVSharingDict]:
    """The mappings among a layer's arguments, in order."""
    leaves = tree_leaves(given, is_leaf=lambda found: isinstance(found, KVSharingDict))
    return [leaf for leaf in leaves if isinstance(leaf, KVSharingDict)]


def stored(before: list[dict[Any, Any]], after: list[KVSharingDict]) -> list[dict[Any, Any]]:
    """The entries that a layer stored: those of each mapping that are new or have another value."""
    pairs = zip(before, after, strict=True)
    return [{key: value for key, value in new.items() if old.get(key) is not value} for old, new in pairs]


class LoopChanged(ValueError):
    """A decoder's loop differs from the one recorded when its layers were grouped."""


class Call:
    """The arguments of one layer; ``promised`` are the tensors that the layer before returned (None: unused)."""

    def __init__(self, args: Any, kwargs: Any, promised: Sequence[Tensor | None]) -> None:
        found, self.spec = tree_flatten_with_path((args, kwargs))
        self.paths, self.leaves = [keystr(path) for path, _ in found], [leaf for _, leaf in found]
        numbers = {id(t): number for number, t in enumerate(promised) if t is not None}
        self.chain = {at: numbers[id(leaf)] for at, leaf in enumerate(self.leaves) if id(leaf) in numbers}
        self.shared = shared_in(args, kwargs)

    def settings(self) -> list[Any]:
        return [None if isinstance(leaf, Tensor) else leaf for leaf in self.leaves]


@dataclass(frozen=True)
class Input:
    """One tensor input of a layer's graph."""

    # ``slot``: the layer before, around the loop. ``chain``: the layer before, inside the period. ``learned`` and
    # ``fixed``: the same for all layers of the run, with and without a gradient. ``own``: of this layer.
    source: str
    index: int  # its position in the source; for ``chain`` the tensor's number in the output of the layer before
    # an argument (``leaf``, by its position), a ``weight`` or ``buffer`` (by its name), the ``key`` of random numbers,
    # or the mask of real ``tokens``
    target: str
    name: Any = None
    dtype: torch.dtype | None = None  # of the leaf or buffer; it may be passed in another (:func:`as_passed`)


@dataclass
class RunTensors:
    """The tensors of a run's calls; ``inputs`` and ``own`` are for each layer of the period."""

    inputs: list[list[Input]]
    slots: list[Tensor] = field(default_factory=list)  # the first layer's arguments that else are the layer's before
    loop: list[int] = field(default_factory=list)  # each slot's number in the output of the period's last layer
    learned: list[Tensor] = field(default_factory=list)
    fixed: list[Tensor] = field(default_factory=list)
    own: list[list[Tensor]] = field(default_factory=list)  # stacked over the turns if there is more than one
    _shared: dict[int, tuple[str, int, Tensor]] = field(default_factory=dict)  # the tensor keeps its id in use

    def share(self, tensor: Tensor, target: str, name: Any) -> Input:
        """Return the input for a tensor that all layers of the run share; it is passed once."""
        if id(tensor) not in self._shared:
            source, group = ("learned", self.learned) if tensor.requires_grad else ("fixed", self.fixed)
            self._shared[id(tensor)] = (source, len(group), tensor)
            group.append(as_passed(tensor))
        source, index, _ = self._shared[id(tensor)]
        return Input(source, index, target, name, tensor.dtype)

    def give(self, j: int, tensor: Tensor, target: str, name: Any = None, dtype: torch.dtype | None = None) -> None:
        """Add an input of its own to layer ``j`` of the period; ``tensor`` is stacked as ``own`` says."""
        self.inputs[j].append(Input("own", len(self.own[j]), target, name, dtype))
        self.own[j].append(tensor)


def sort_calls(calls: Sequence[Call], period: int) -> RunTensors:
    """Sort the tensors of ``calls``, one for each layer of a run.

    Raises:
        LoopChanged: calls a period apart differ in more than the values of tensors.
    """
    out = RunTensors([[] for _ in range(period)], own=[[] for _ in range(period)])
    for j in range(period):
        first, *others = same = calls[j::period]
        for r, other in enumerate(others, start=1):
            if (first.paths, first.spec) != (other.paths, other.spec) or first.settings() != other.settings():
                raise LoopChanged(f"layers {j} and {j + r * period} of a run are given other arguments")
        for at, leaf in enumerate(first.leaves):
            if isinstance(leaf, Tensor):
                _sort_leaf(out, j, at, [call.leaves[at] for call in same], [call.chain.get(at) for call in same])
    return out


def _sort_leaf(out: RunTensors, j: int, at: int, column: list[Tensor], chain: list[int | None]) -> None:
    """Add argument ``at`` of layer ``j``, one tensor a turn; ``chain`` has its numbers in :attr:`Call.chain`."""
    if not any(known is not None for known in chain):
        if all(t is column[0] for t in column):
            out.inputs[j].append(out.share(column[0], "leaf", at))
        else:
            passed = [as_passed(t) for t in column]
            out.give(j, torch.stack(passed), "leaf", at, column[0].dtype)
        return
    begins = j == 0 and chain[0] is None  # the run's first layer takes a tensor computed before the run
    expected = chain[-1]
    if expected is None or any(known != expected for known in chain[begins:]):
        raise LoopChanged(f"argument {at} of layer {j} of a run comes from other layers at other turns")
    source, index = ("slot", len(out.slots)) if begins else ("chain", expected)
    if begins:
        out.slots.append(as_passed(column[0]))
        out.loop.append(expected)
    out.inputs[j].append(Input(source, index, "leaf", at, column[0].dtype))


def as_passed(t: Tensor) -> Tensor:
    """Return ``t`` in a form that a scan can pass, with the same information."""
    # torch_xla multiplies a scan's inputs by 1, which makes integers of bools; and it can put no barrier behind a
    # ``view_as_real``, so complex numbers become pairs
    if t.is_complex():
        if t.requires_grad:
            raise LoopChanged("a layer is given complex numbers that require a gradient")
        return torch.stack((t.real, t.imag), dim=-1)
    return t.to(torch.uint8) if t.dtype == torch.bool else t


def as_given(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Invert :func:`as_passed`, given the original ``dtype``; None: ``t`` was passed unchanged."""
    if dtype is None:
        return t
    if dtype.is_complex:
        return torch.view_as_complex(t)
    return t if t.dtype == dtype else t.to(dtype)
