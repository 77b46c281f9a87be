"""Lazy tensors: expressions over arrays, of which reading a slice reads only the slices that it depends on.

transformers turns a checkpoint's tensors into a model's with torch operations (stack the experts, concatenate gate and
up, …), and back again. Given lazy tensors, its own code records these operations instead of running them; shapes are
known at once, from the meta device. An operation that only moves values maps a wanted slice to slices of its inputs;
any other is computed whole at the first read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map_only  # semi-private: torch/utils/_pytree.py, torch 2.9

from shardwright.files.arrays import Array, Slices

# writes the values at the slices into a tensor of their shape
Fill: TypeAlias = Callable[[Slices, torch.Tensor], None]


class Lazy:
    """A lazy tensor, which torch's functions and methods take for a tensor.

    Args:
        like: a meta tensor of its shape and dtype.
        fill: writes a slice of it into a tensor.
        array: the values of a leaf; None for an expression.
    """

    def __init__(self, like: torch.Tensor, fill: Fill, array: Array | None = None) -> None:
        self.like, self.fill, self.array = like, fill, array

    @classmethod
    def of(cls, array: Array) -> Lazy:
        """A leaf with the values of ``array``."""

        def fill(where: Slices, out: torch.Tensor) -> None:
            out.copy_(array[where])

        return cls(torch.empty(tuple(array.shape), dtype=array.dtype, device="meta"), fill, array)

    @property
    def shape(self) -> torch.Size:
        return self.like.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.like.dtype

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
        meta_args, meta_kwargs = tree_map_only(Lazy, lambda lazy: lazy.like, (args, kwargs))
        like = function(*meta_args, **meta_kwargs)
        several = isinstance(like, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in like)
        if not (several or isinstance(like, torch.Tensor)):
            return like  # a size or a flag
        name = getattr(function, "__name__", "")
        if name in ("contiguous", "clone", "detach"):
            return args[0]
        parts = list(like) if several else [like]
        fills = MOVES[name](parts, *args, **kwargs) if name in MOVES else _computed(parts, function, args, kwargs)
        found = [cls(part, fill) for part, fill in zip(parts, fills, strict=True)]
        return tuple(found) if several else found[0]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        attribute = getattr(torch.Tensor, name)
        if callable(attribute):
            return lambda *args, **kwargs: Lazy.__torch_function__(attribute, (), (self, *args), kwargs)
        return Lazy.__torch_function__(attribute.__get__, (), (self,))


def _operator(name: str) -> Callable[..., Any]:
    """A method that records the tensor's own operator ``name``."""
    function = getattr(torch.Tensor, name)
    return lambda self, *args: Lazy.__torch_function__(function, (), (self, *args))


# Python looks operators up on the class, where __getattr__ does not reach
for _name in ("getitem", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg"):
    setattr(Lazy, f"__{_name}__", _operator(f"__{_name}__"))


def _computed(
    parts: Sequence[torch.Tensor], function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[Fill]:
    """Fills of any operation: computed whole at the first read, and kept as long as the expression."""

    @functools.cache
    def values() -> Sequence[torch.Tensor]:
        whole_args, whole_kwargs = tree_map_only(Lazy, Lazy.read, (args, kwargs))
        result = function(*whole_args, **whole_kwargs)
        return [result] if isinstance(result, torch.Tensor) else result

    def fill(index: int, where: Slices, out: torch.Tensor) -> None:
        out.copy_(values()[index][where])

    return [functools.partial(fill, index) for index in range(len(parts))]


def _stack(parts: Sequence[torch.Tensor], tensors: Sequence[Any], dim: int = 0) -> list[Fill]:
    dim %= parts[0].dim()

    def fill(where: Slices, out: torch.Tensor) -> None:
        for i, index in enumerate(range(where[dim].start, where[dim].stop)):
            _fill_of(tensors[index])(where[:dim] + where[dim + 1 :], out.select(dim, i))

    return [fill]


def _cat(parts: Sequence[torch.Tensor], tensors: Sequence[Any], dim: int = 0) -> list[Fill]:
    dim %= parts[0].dim()

    def fill(where: Slices, out: torch.Tensor) -> None:
        wanted, start = where[dim], 0
        for tensor in tensors:
            low, high = max(wanted.start, start), min(wanted.stop, start + tensor.shape[dim])
            if low < high:
                inside = (*where[:dim], slice(low - start, high - start), *where[dim + 1 :])
                _fill_of(tensor)(inside, out.narrow(dim, low - wanted.start, high - low))
            start += tensor.shape[dim]

    return [fill]


def _transpose(parts: Sequence[torch.Tensor], tensor: Any, dim0: int, dim1: int) -> list[Fill]:
    def fill(where: Slices, out: torch.Tensor) -> None:
        swapped = list(where)
        swapped[dim0], swapped[dim1] = swapped[dim1], swapped[dim0]
        _fill_of(tensor)(tuple(swapped), out.transpose(dim0, dim1))

    return [fill]


def _split(parts: Sequence[torch.Tensor], tensor: Any, sizes: Any, dim: int = 0) -> list[Fill]:
    dim %= parts[0].dim()

    def fill(start: int, where: Slices, out: torch.Tensor) -> None:
        moved = slice(where[dim].start + start, where[dim].stop + start)
        _fill_of(tensor)((*where[:dim], moved, *where[dim + 1 :]), out)

    starts = [sum(part.shape[dim] for part in parts[:i]) for i in range(len(parts))]
    return [functools.partial(fill, start) for start in starts]


def _squeeze(parts: Sequence[torch.Tensor], tensor: Any, dim: int) -> list[Fill]:
    dim %= len(tensor.shape)

    def fill(where: Slices, out: torch.Tensor) -> None:
        if tensor.shape[dim] == 1:
            where, out = (*where[:dim], slice(0, 1), *where[dim:]), out.unsqueeze(dim)
        _fill_of(tensor)(where, out)

    return [fill]


def _unsqueeze(parts: Sequence[torch.Tensor], tensor: Any, dim: int) -> list[Fill]:
    dim %= parts[0].dim()
    return [lambda where, out: _fill_of(tensor)(where[:dim] + where[dim + 1 :], out.squeeze(dim))]


MOVES: dict[str, Callable[..., list[Fill]]] = {
    "stack": _stack,
    "cat": _cat,
    "concat": _cat,
    "concatenate": _cat,
    "transpose": _transpose,
    "chunk": _split,
    "split": _split,
    "squeeze": _squeeze,
    "unsqueeze": _unsqueeze,
}


def _fill_of(tensor: Lazy | torch.Tensor) -> Fill:
    return (tensor if isinstance(tensor, Lazy) else Lazy.of(tensor)).fill
