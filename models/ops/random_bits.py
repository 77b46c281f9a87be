"""Random numbers as a pure function of a key and a position: Threefry-2x32 on counters.

A stateful generator draws other numbers where a graph computes something again, as remat does in the backward. Here an
element's number depends only on the key, on the number of the *site* (the place in the model that draws) and on the
element's position. So each device computes its own shard of a draw, as often as it likes (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", 2011; with 13 rounds).

A key is a tensor of two 32-bit words, int32 [2]: data, which may change without a compile. Dropout and the uniform draw
are operations, so AOTAutograd saves the key, never a mask. On XLA they are JAX functions; on the CPU numpy computes the
same numbers with the same code.
"""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.models.ops.jax_call import jax_call, jnp
from shardwright.models.ops.operation import operation

# an array of jax or of numpy, according to the argument ``xp``
Array = Any

_WORD = 2**32
_ROTATIONS = (13, 15, 26, 6, 17, 29, 16, 24)
# the least that passes BigCrush; on a TPU the masks take two thirds of the cycles of 20 rounds
_ROUNDS = 13
# the second word of the counter that derives a key: the key's purpose
_FOR_SITE, _FOR_LAYER, _FOR_ROW = 0, 1, 2


def key_of(text: str) -> list[int]:
    """The two words of a key, as int32 values; equal for equal texts, in every process."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]


def layer_keys(key: Tensor, first: int, count: int) -> Tensor:
    """Derive the keys of layers ``first``, ``first + 1``, …, int32 [count, 2], from the model's ``key``."""
    return _call(_layer_keys, key, first=first, count=count)


def row_keys(key: Tensor, count: int) -> Tensor:
    """Derive the keys of the ``count`` rows of a step's batch, int32 [count, 2], from the step's ``key``."""
    return _call(_row_keys, key, count=count)


def row_noise(keys: Tensor, positions: Tensor, width: int) -> Tensor:
    """Float32 noise, uniform over the multiples of 2**-23 in [-1, 1): for each row's key [B, 2] its own.

    ``positions``, integers [B, S], are those of the row's tokens, ``width`` numbers for each: [B, S, width].
    """
    return _call(_row_noise, keys, positions, width=width)


@operation("dropout", lambda x, *_: x.new_empty(x.shape))
def dropout(x: Tensor, key: Tensor, site: int, rate: float) -> Tensor:
    """Replace each element of ``x`` by 0 with probability ``rate``, and divide the others by ``1 - rate``."""
    return (x * keep_factors(key, x.shape, site, rate)).to(x.dtype)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, key, ctx.site, ctx.rate = inputs
    ctx.save_for_backward(key)


dropout.register_autograd(
    lambda ctx, grad: (dropout(grad, *ctx.saved_tensors, ctx.site, ctx.rate), None, None, None), setup_context=_save
)


@operation("uniform", lambda key, shape, _: key.new_empty(shape, dtype=torch.float32))
def uniform(key: Tensor, shape: Sequence[int], site: int) -> Tensor:
    """Float32 numbers, uniform over the multiples of 2**-24 in [0, 1)."""
    return _call(_uniform, key, shape=tuple(shape), site=site)


def keep_factors(key: Tensor, shape: Sequence[int], site: int, rate: float, rows: Tensor | None = None) -> Tensor:
    """The float32 factors that :func:`dropout` multiplies a tensor of ``shape`` by: 0 or ``1 / (1 - rate)``.

    ``rows``, [C] integers, are the wanted rows of square matrices [..., S, S]; ``shape`` is then [..., C, S].
    """
    given = [key] if rows is None else [key, rows]
    return _call(_factors, *given, shape=tuple(shape), site=site, rate=rate)


def _call(function: Callable[..., Any], *tensors: Tensor, **static: Any) -> Tensor:
    if tensors[0].device.type == "xla":
        return jax_call(function, *tensors, **static)[0]
    return torch.from_numpy(np.asarray(function(*(t.numpy() for t in tensors), xp=np, **static)))


def _layer_keys(key: Array, *, first: int, count: int, xp: Any = jnp) -> Array:
    layers = first + xp.arange(count, dtype=xp.uint32)
    return xp.stack(_threefry(key, layers, xp.full_like(layers, _FOR_LAYER), xp), axis=1).astype(xp.int32)


def _row_keys(key: Array, *, count: int, xp: Any = jnp) -> Array:
    rows = xp.arange(count, dtype=xp.uint32)
    return xp.stack(_threefry(key, rows, xp.full_like(rows, _FOR_ROW), xp), axis=1).astype(xp.int32)


def _row_noise(keys: Array, positions: Array, *, width: int, xp: Any = jnp) -> Array:
    words = xp.moveaxis(keys, 1, 0)[:, :, None, None]
    columns = xp.arange(width, dtype=xp.uint32)
    (bits,) = _threefry(words, positions.astype(xp.uint32)[..., None], columns, xp)[0]
    return (bits >> 8).astype(xp.float32) * np.float32(2**-23) - 1


def _uniform(key: Array, *, shape: tuple[int, ...], site: int, xp: Any = jnp) -> Array:
    return (_bits(key, None, shape, site, xp) >> 8).astype(xp.float32) * np.float32(2**-24)


def _factors(
    key: Array, rows: Array | None = None, *, shape: tuple[int, ...], site: int, rate: float, xp: Any = jnp
) -> Array:
    least = min(round(rate * _WORD), _WORD - 1)  # of the random words that keep their element
    scale = 1 / (1 - rate) if rate < 1 else 0.0
    return xp.where(_bits(key, rows, shape, site, xp) >= xp.uint32(least), xp.float32(scale), xp.float32(0))


def _bits(key: Array, rows: Array | None, shape: tuple[int, ...], site: int, xp: Any) -> Array:
    """32 bits for each element. Its counter is its row's number among all rows of the tensor, and its column."""
    *leading, width = shape or (1,)
    number, stride = xp.zeros((), xp.uint32), 1
    for dim, size in reversed(list(enumerate(leading))):
        own = xp.arange(size, dtype=xp.uint32)
        if rows is not None and dim == len(leading) - 1:
            own, size = rows.astype(xp.uint32), width
        number = number + (own * xp.uint32(stride % _WORD)).reshape(-1, *[1] * (len(leading) - 1 - dim))
        stride *= size
    of_site = _threefry(key, xp.full(1, site, xp.uint32), xp.full(1, _FOR_SITE, xp.uint32), xp)
    columns = xp.arange(width, dtype=xp.uint32)
    return _threefry(xp.concatenate(of_site), number[..., None], columns, xp)[0].reshape(shape)


def _threefry(key: Array, x: Array, y: Array, xp: Any) -> tuple[Array, Array]:
    """The two random words of the counter (x, y), which are uint32 and broadcast."""
    key = key.astype(xp.uint32)
    # slices: numpy warns where a scalar overflows
    keys = (key[0:1], key[1:2], key[0:1] ^ key[1:2] ^ xp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for number in range(_ROUNDS):
        rotation = _ROTATIONS[number % 8]
        x = x + y
        y = (y << rotation | y >> (32 - rotation)) ^ x
        if number % 4 == 3:
            group = number // 4 + 1
            x, y = x + keys[group % 3], y + (keys[(group + 1) % 3] + xp.uint32(group))
    return x, y
