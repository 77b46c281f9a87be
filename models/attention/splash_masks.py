"""Masks of splash attention's kernel in JAX: lists of blocks that meet, and functions of positions.

jax's public function makes its lists by evaluating the mask block by block: 25 s for each of three kernels at 131,072
tokens, where :func:`_blocks` takes none. In scalar memory, [blocks, blocks], they allow about 500 blocks without a
window.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from shardwright.models.attention.portable import Scoring

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import Array, jnp

# isort: split
# semi-private: splash_attention_mask_info.py there, jax 0.7.1
from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_mask_info import MaskInfo


class BlockSizes(NamedTuple):
    """Token counts: of the padded sequence, of a block, and of the part of a block that is multiplied at once."""

    length: int
    block: int
    compute: int


class Mask(NamedTuple):
    """The keys that queries see: the nonempty blocks for each block of queries or keys, and a function of positions."""

    sizes: BlockSizes
    queries: MaskInfo
    keys: MaskInfo
    # of a query's entry in ``positions`` of the lists, and a key's index among the keys
    function: Callable[[Array, Array], Array] | None
    # the same as that function, for kernels that skip blocks by themselves
    causal: bool  # a query sees no later key
    window: int | None
    chunk: int | None
    keys_before: int | None  # no key from here on is seen


def causal(sizes: BlockSizes, scoring: Scoring) -> Mask:
    """The mask of a whole sequence, or of a piece of one and its own keys."""
    queries, keys = (_blocks(sizes, scoring, rows) for rows in ("queries", "keys"))
    return Mask(sizes, queries, keys, _sees(scoring), True, scoring.window, scoring.chunk, None)


def earlier_keys(sizes: BlockSizes, scoring: Scoring, length: int, distance: Array) -> Mask:
    """The mask of ``length`` queries over as many keys, all ``distance`` tokens (0-d int32) before: a window or all."""
    count, window = sizes.length // sizes.block, scoring.window
    own = jnp.arange(count, dtype=jnp.int32)
    keys = jnp.broadcast_to(own, (count, count)).astype(jnp.int8 if count <= 128 else jnp.int16)
    run = jnp.ones((count, count), jnp.int8)
    if window is not None:
        run = (distance + (own[:, None] - own) * sizes.block - (sizes.block - 1) < window).astype(jnp.int8)

    def sees(query: Array, key: Array) -> Array:
        seen = key < length
        return seen if window is None else seen & (query - key < window)

    masks = window is not None or length < sizes.length
    positions: Any = distance + jnp.arange(sizes.length, dtype=jnp.int32) if masks else None
    queries, met = (MaskInfo(x[None], None, run[None], None, positions) for x in (keys, keys.T))
    padded = length if length < sizes.length else None
    return Mask(sizes, queries, met, sees if masks else None, False, window, None, padded)


def _blocks(sizes: BlockSizes, scoring: Scoring, rows: str) -> MaskInfo:
    """List, for each block of ``rows`` ("queries" or "keys"), the blocks of the other kind that it meets, in order."""
    count = sizes.length // sizes.block
    # no token of a chunk lies further back than the chunk's length
    window = min(filter(None, (scoring.window, scoring.chunk)), default=None)
    reach = count - 1 if window is None else min(-(-(window - 1) // sizes.block), count - 1)
    # computed in the graph: a numpy array would be a constant in the graph's text, as large as the lists
    own = jnp.arange(count, dtype=jnp.int32)[:, None]
    first, last = (own - reach, own) if rows == "queries" else (own, own + reach)
    first, last = jnp.maximum(first, 0), jnp.minimum(last, count - 1)
    # all lists have one length: a shorter one is filled up in front with its first block, which is not run there
    met = last - jnp.arange(reach, -1, -1, dtype=jnp.int32)
    fetched = jnp.maximum(met, first).astype(jnp.int8 if count <= 128 else jnp.int16)
    run = (met >= first).astype(jnp.int8)
    if rows == "keys":
        fetched, run = fetched.T, run.T
    positions: Any = jnp.arange(sizes.length, dtype=jnp.int32)
    return MaskInfo(fetched[None], None, run[None], None, positions)


def _sees(scoring: Scoring) -> Callable[[Array, Array], Array]:
    def sees(query: Array, key: Array) -> Array:
        seen = query >= key
        if scoring.window is not None:
            seen = seen & (query - key < scoring.window)
        return seen if scoring.chunk is None else seen & (query // scoring.chunk == key // scoring.chunk)

    return sees
