"""A weight in its stored layout, so that a loop over stacked layers does not copy the whole stack.

The TPU compiler gives a loop's inputs the layout that the loop's products like best. If that is not the stored layout,
all layers are copied before the loop, and both copies live as long as it runs. Here each layer is laid out by itself.
"""

import itertools
import math
from collections.abc import Sequence

import torch
from jax.experimental.layout import Layout, with_layout_constraint
from torch import Tensor

from shardwright.models.ops.jax_call import Array, Manual, jax_call
from shardwright.models.ops.operation import kernel

_ROWS, _COLUMNS = 8, 128  # of a tile
_WORD = 4  # bytes: narrower values are packed, row on row


def as_stored(weight: Tensor, manual: Manual, layers: int = 0) -> Tensor:
    """Constrain ``weight`` to the order in which each device stores its share; its gradient is not touched.

    ``manual`` is its layout, as one input and one output. It is a slice of a stack of ``layers``; 0: by itself.
    """
    return _as_stored([weight], manual, layers)


def stored_order(shape: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """The dimensions of one device's share, an array of at least two, as a TPU stores it, the outermost first."""

    # the last two are padded to tiles; the pair with the least padding is last (on a tie, the last in ``shape``)
    def padded(pair: tuple[int, int]) -> tuple[int, int, int]:
        rows, columns = pair
        height = _ROWS
        while height > max(1, _WORD // itemsize) and height // 2 >= shape[rows]:
            height //= 2
        tiles = math.ceil(shape[rows] / height) * math.ceil(shape[columns] / _COLUMNS)
        others = math.prod(size for dim, size in enumerate(shape) if dim not in pair)
        return tiles * height * others, -columns, -rows

    last = min(itertools.permutations(range(len(shape)), 2), key=padded)
    return (*(dim for dim in range(len(shape)) if dim not in last), *last)


@kernel(
    "as_stored",
    like=lambda weights, *_: torch.empty_like(weights[0]),
    gradients=lambda gradient, *_: [gradient],
    saved=lambda *_: (),
)
def _as_stored(weights: Sequence[Tensor], manual: Manual, layers: int) -> Tensor:
    return jax_call(ordered, *weights, manual=manual, layers=layers)[0]


def ordered(x: Array, layers: int = 0) -> Array:
    """Constrain jax's ``x`` as :func:`as_stored` does."""
    if not layers:
        return with_layout_constraint(x, Layout(stored_order(x.shape, x.dtype.itemsize)))
    stack, *order = stored_order((layers, *x.shape), x.dtype.itemsize)
    if stack != 0:  # a tile holds values of several layers
        return x
    return with_layout_constraint(x, Layout(tuple(dim - 1 for dim in order)))
