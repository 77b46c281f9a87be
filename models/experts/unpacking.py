"""Frozen experts' weights in fewer bits, unpacked a few experts at a time inside the products, in JAX.

Unpacked at once, a layer's experts would take two bytes a weight beside their codes, several GiB in a large model.

Shape suffixes: R rows, K and N widths, E experts held by a device.
"""

import functools
import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.models.adapters.packings.registry import Packing, Weight
from shardwright.models.experts import grouped_matmul
from shardwright.models.ops import torch_in_jax
from shardwright.models.ops.device_kernels import kernels
from shardwright.models.ops.fusion_barrier import apart
from shardwright.models.ops.jax_call import Array, jax, jnp, lax
from shardwright.models.ops.kernel_cost import Tiles
from shardwright.models.ops.torch_in_jax import Steps

# of the weights that are unpacked at once: so many that a product's own start matters little
MOST_BYTES = 2**27


@dataclass(frozen=True)
class Unpacking:
    """The unpacking of so many experts' weights at once.

    Args:
        turned: whether the result's last two dimensions are swapped, as the codes lie.
    """

    steps: Steps
    dtype: str
    experts: int
    turned: bool


@functools.partial(jax.tree_util.register_dataclass, data_fields=["codes", "scale"], meta_fields=["by"])
@dataclass(frozen=True)
class PackedExperts:
    """The codes and scales of a weight of a device's experts, both with the experts first."""

    codes: Array
    scale: Array
    by: Unpacking

    @property
    def dtype(self) -> Any:
        """The dtype of the unpacked weights."""
        return jnp.dtype(self.by.dtype)

    def multiply(self, x_RK: Array, sizes_E: Array, tile: Tiles, *, contract_last: bool) -> Array:
        """Return `shardwright.models.experts.grouped_matmul.multiply` of the unpacked weights: [R, N]."""

        def turn(i: Array, y_RN: Array) -> Array:
            first = i * self.by.experts
            few = (lax.dynamic_slice_in_dim(part, first, self.by.experts) for part in (self.codes, self.scale))
            part = grouped_matmul.Part(first, y_RN)
            return grouped_matmul.multiply(x_RK, self._unpack(*few), sizes_E, tile, part, contract_last=contract_last)

        N = self.by.steps.shape[1 if self.by.turned != contract_last else 2]
        y_RN = kernels().unwritten((len(x_RK), N), x_RK.dtype, sizes_E)
        return lax.fori_loop(0, len(self.codes) // self.by.experts, turn, y_RN)

    def whole(self) -> Array:
        """All the weights at once."""
        parts = (part.reshape(-1, self.by.experts, *part.shape[1:]) for part in (self.codes, self.scale))
        unpacked = lax.map(lambda few: self._unpack(*few), tuple(parts))
        return unpacked.reshape(-1, *unpacked.shape[2:])

    def _unpack(self, codes: Array, scale: Array) -> Array:
        unpacked = self.by.steps.run(_OPERATIONS, codes, scale)
        return unpacked.swapaxes(1, 2) if self.by.turned else unpacked


def unpacking_of(packing: Packing, weight: Weight, dtype: torch.dtype, held: int) -> Unpacking:
    """Unpack to ``dtype``, for a device that holds ``held`` of the weight's experts."""
    each = math.prod(weight.shape[1:]) * dtype.itemsize
    few = max(n for n in range(1, held + 1) if held % n == 0 and (n == 1 or n * each <= MOST_BYTES))
    return _traced(packing, weight, dtype, few)


@functools.lru_cache(maxsize=64)
def _traced(packing: Packing, weight: Weight, dtype: torch.dtype, experts: int) -> Unpacking:
    parts = packing.codes(weight), packing.scales(weight)
    inputs = [((experts, *part.shape[1:]), part.dtype) for part in parts]
    steps = torch_in_jax.trace(
        lambda codes, scale: packing.unpack(codes, scale, weight, dtype, apart), _OPERATIONS, *inputs
    )
    return Unpacking(steps, str(dtype).removeprefix("torch."), experts, packing.lies_turned(weight))


def _view(x: Array, shape: tuple[int, ...]) -> Array:
    return x.reshape(shape)


def _slice(x: Array, dim: int = 0, start: int = 0, end: int | None = None) -> Array:
    return lax.slice_in_dim(x, start, x.shape[dim] if end is None else min(end, x.shape[dim]), axis=dim)


# ATen's operation → JAX's
_OPERATIONS: dict[str, Callable[..., Array]] = {
    **{name: getattr(operator, name) for name in ("mul", "sub", "add", "neg", "ge", "gt", "lt")},
    "floor": jnp.floor,
    "where": jnp.where,
    "scalar_tensor": lambda number, **_: jnp.float32(number),
    "arange": lambda end, **_: jnp.arange(end, dtype=jnp.int32),
    "_to_copy": lambda x, dtype, **_: x.astype(str(dtype).removeprefix("torch.")),
    "apart": lax.optimization_barrier,
    "clone": lambda x, **_: x,
    "view": _view,
    "_unsafe_view": _view,
    "unsqueeze": jnp.expand_dims,
    "expand": lambda x, shape: jnp.broadcast_to(x, [n if n >= 0 else x.shape[i] for i, n in enumerate(shape)]),
    "transpose": jnp.swapaxes,
    "slice": _slice,
}
