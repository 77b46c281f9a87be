"""Lazy tensors: expressions over arrays, of which reading a slice reads only the slices that it depends on.

transformers turns a checkpoint's tensors into a model's with torch operations (stack the experts, concatenate gate and
up, …), and back again. Given lazy tensors, its own code records these operations instead of running them; shapes are
known at once, from the meta device. An operation that only moves values maps a wanted slice to slices of its inputs;
any other is computed whole at the first read.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from shardwright.files.arrays import Array, Slices

# writes the values at the slices into a tensor of their shape
Fill: TypeAlias = Callable[[Slices, torch.Tensor], object]
# an input, slices of it, and the part of the result that they fill
Moved: TypeAlias = Iterator[tuple["Lazy | torch.Tensor", Slices, torch.Tensor]]


class Lazy:
    """A lazy tensor, which torch's functions and methods take for a tensor.

    ``like`` is a meta tensor of its shape and dtype, and ``array`` has the values of a leaf; None: an expression.
    ``names`` are those of the leaves in it that have one.
    """

    def __init__(
        self, like: torch.Tensor, fill: Fill, array: Array | None = None, names: frozenset[str] = frozenset()
    ) -> None:
        self.like, self.fill, self.array, self.names = like, fill, array, names
        self.shape, self.dtype = like.shape, like.dtype

    @classmethod
    def of(cls, array: Array, name: str | None = None) -> Lazy:
        """A leaf with the values of ``array``."""
        like = torch.empty(tuple(array.shape), dtype=array.dtype, device="meta")
        names = frozenset() if name is None else frozenset([name])
        return cls(like, lambda where, out: out.copy_(array[where]), array, names)

    # for isinstance(…, torch.Tensor), which some of transformers' operations ask
    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return torch.Tensor

    def read(self, where: Slices | None = None) -> torch.Tensor:
        """The values at ``where``, slices of step 1, on the host; by default the whole."""
        bounds = zip(where or [slice(None)] * len(self.shape), self.shape, strict=True)
        where = tuple(slice(*part.indices(size)[:2]) for part, size in bounds)
        if self.array is not None:
            return self.array[where]
        out = torch.empty([part.stop - part.start for part in where], dtype=self.dtype)
        self.fill(where, out)
        return out

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        args, kwargs = tuple(args), dict(kwargs or {})
        leaves: list[Lazy] = []

        def meta(lazy: Lazy) -> torch.Tensor:
            leaves.append(lazy)
            return lazy.like

        like = function(*_replaced(args, meta), **_replaced(kwargs, meta))
        name = getattr(function, "__name__", "")
        if name in APART:
            return APART[name](like, *args, **kwargs)
        if not isinstance(like, torch.Tensor):
            assert not isinstance(like, tuple) or torch.Tensor not in map(type, like), f"{name} of a lazy tensor"
            return like  # a size or a flag
        if name in ("contiguous", "clone", "detach") or (name == "to" and like.dtype == args[0].dtype):
            return args[0]
        names = frozenset().union(*(each.names for each in leaves))
        if name in MOVES:
            return cls(like, functools.partial(_move, MOVES[name], args, kwargs), names=names)

        @functools.cache  # as long as the expression lives
        def computed() -> torch.Tensor:
            values: torch.Tensor = function(*_replaced(args, Lazy.read), **_replaced(kwargs, Lazy.read))
            return values

        return cls(like, lambda where, out: out.copy_(computed()[where]), names=names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)
        if callable(attribute):
            return lambda *args, **kwargs: Lazy.__torch_function__(attribute, (), (self, *args), kwargs)
        return Lazy.__torch_function__(attribute.__get__, (), (self,))


def _replaced(value: Any, replace: Callable[[Lazy], torch.Tensor]) -> Any:
    """``value`` with a tensor in the place of each lazy one in it, also in lists, tuples and dicts."""
    kind = type(value)  # torch's own tree_map_only takes longer than the operations themselves
    if kind is Lazy:
        return replace(value)
    if kind in (list, tuple):
        return kind(_replaced(each, replace) for each in value)
    return {key: _replaced(each, replace) for key, each in value.items()} if kind is dict else value


def _operator(name: str) -> Callable[..., Any]:
    return lambda self, *args: Lazy.__torch_function__(getattr(torch.Tensor, name), (), (self, *args))


# Python looks operators up on the class, where __getattr__ does not reach
for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg"):
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))


# ---- operations that only move values: a wanted slice, what it goes into, and the operation's own arguments ----


def _move(
    move: Callable[..., Moved], args: tuple[Any, ...], kwargs: dict[str, Any], where: Slices, out: torch.Tensor
) -> None:
    for tensor, inside, into in move(where, out, *args, **kwargs):
        (tensor if isinstance(tensor, Lazy) else Lazy.of(tensor)).fill(inside, into)


def _stack(where: Slices, out: torch.Tensor, tensors: Sequence[Any], dim: int = 0) -> Moved:
    dim %= out.dim()
    for i, index in enumerate(range(where[dim].start, where[dim].stop)):
        yield tensors[index], where[:dim] + where[dim + 1 :], out.select(dim, i)


def _cat(where: Slices, out: torch.Tensor, tensors: Sequence[Any], dim: int = 0) -> Moved:
    dim %= out.dim()
    wanted, start = where[dim], 0
    for tensor in tensors:
        low, high = max(wanted.start, start), min(wanted.stop, start + tensor.shape[dim])
        if low < high:
            inside = (*where[:dim], slice(low - start, high - start), *where[dim + 1 :])
            yield tensor, inside, out.narrow(dim, low - wanted.start, high - low)
        start += tensor.shape[dim]


def _transpose(where: Slices, out: torch.Tensor, tensor: Any, dim0: int, dim1: int) -> Moved:
    swapped = list(where)
    swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
    yield tensor, tuple(swapped), out.transpose(dim0, dim1)


def _narrow(where: Slices, out: torch.Tensor, tensor: Any, dim: int, start: int, length: int) -> Moved:
    dim %= out.dim()
    yield tensor, (*where[:dim], slice(where[dim].start + start, where[dim].stop + start), *where[dim + 1 :]), out


def _squeeze(where: Slices, out: torch.Tensor, tensor: Any, dim: int) -> Moved:
    dim %= len(tensor.shape)
    if tensor.shape[dim] == 1:
        where, out = (*where[:dim], slice(0, 1), *where[dim:]), out.unsqueeze(dim)
    yield tensor, where, out


def _unsqueeze(where: Slices, out: torch.Tensor, tensor: Any, dim: int) -> Moved:
    dim %= out.dim()
    yield tensor, where[:dim] + where[dim + 1 :], out.squeeze(dim)


def _to(where: Slices, out: torch.Tensor, tensor: Any, *args: Any, **kwargs: Any) -> Moved:
    yield tensor, where, out  # of the other dtype: values are cast as they are copied into it


MOVES: dict[str, Callable[..., Moved]] = dict.fromkeys(("cat", "concat", "concatenate"), _cat) | {
    move.__name__[1:]: move for move in (_stack, _transpose, _narrow, _squeeze, _unsqueeze, _to)
}


def _split(parts: Sequence[torch.Tensor], tensor: Lazy, sizes: Any, dim: int = 0) -> tuple[Lazy, ...]:
    starts = itertools.accumulate((part.shape[dim] for part in parts), initial=0)
    return tuple(tensor.narrow(dim, start, part.shape[dim]) for part, start in zip(parts, starts, strict=False))


def _unbind(parts: Sequence[torch.Tensor], tensor: Lazy, dim: int = 0) -> tuple[Lazy, ...]:
    return tuple(tensor.narrow(dim, index, 1).squeeze(dim) for index in range(len(parts)))


APART: dict[str, Callable[..., tuple[Lazy, ...]]] = {"split": _split, "chunk": _split, "unbind": _unbind}
