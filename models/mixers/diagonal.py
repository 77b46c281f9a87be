"""Recurrences of single numbers, and the short convolution that goes before most of them.

Mamba's selective scan (arXiv:2312.00752), the RG-LRU (arXiv:2402.19427) and RWKV's attention (arXiv:2305.13048) combine
the tokens of a segment in a tree (`jax.lax.associative_scan`), and segments one by one.

Shape suffixes: B rows, T tokens, S tokens of a segment, D channels, N numbers of a channel's state.
"""

from typing import Any

from shardwright.models.mixers.segments import over_segments
from shardwright.models.ops.jax_call import Array, jnp, lax

_SEGMENT = 128
_LEAST = -1e38  # the maximum over no tokens


def selective_scan(x_BTD: Array, dt_BTD: Array, a_DN: Array, b_BTN: Array, c_BTN: Array) -> Array:
    """h' = exp(dt a) h + dt x b, and c · h' for each token and channel: [B, T, D], computed in float32."""

    def step(state_BND: Array, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        x, dt, b, c = (array.astype(jnp.float32) for array in arrays)
        decay = jnp.exp(dt[:, :, None] * a_DN.astype(jnp.float32).T)  # BSND: channels last, where a TPU has its lanes
        states = _recurrence(decay, (dt * x)[:, :, None] * b[..., None], state_BND)
        return states[:, -1], jnp.sum(states * c[..., None], axis=2).astype(x_BTD.dtype)

    state = jnp.zeros((x_BTD.shape[0], *a_DN.shape[::-1]), jnp.float32)
    return over_segments(step, state, (x_BTD, dt_BTD, b_BTN, c_BTN), _segment_of(x_BTD))


def linear_recurrence(x_BTD: Array, a_BTD: Array) -> Array:
    """h' = a h + x for each channel: every h', [B, T, D], computed in float32."""

    def step(state_BD: Array, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
        x, a = (array.astype(jnp.float32) for array in arrays)
        states = _recurrence(a, x, state_BD)
        return states[:, -1], states.astype(x_BTD.dtype)

    state = jnp.zeros((x_BTD.shape[0], x_BTD.shape[2]), jnp.float32)
    return over_segments(step, state, (x_BTD, a_BTD), _segment_of(x_BTD))


def wkv(v_BTD: Array, k_BTD: Array, decay_D: Array, first_D: Array) -> Array:
    """RWKV-4's mean of the values so far, weighted by exp(k), each token's weight decayed; [B, T, D] in float32.

    ``decay_D``, at most 0, is the change of an exponent with each token; ``first_D`` is added to the token's own.
    """

    # sums are kept divided by exp of the largest exponent in them
    def combine(early: tuple[Array, ...], late: tuple[Array, ...]) -> tuple[Array, ...]:
        (fall, most, *sums), (fall2, most2, *sums2) = early, late
        top = lax.stop_gradient(jnp.maximum(most + fall2, most2))
        was, now = jnp.exp(most + fall2 - top), jnp.exp(most2 - top)
        return fall + fall2, top, *(was * s + now * s2 for s, s2 in zip(sums, sums2, strict=True))

    def step(state: tuple[Array, ...], arrays: tuple[Array, ...]) -> tuple[tuple[Array, ...], Array]:
        k, v = (array.astype(jnp.float32) for array in arrays)
        fall = jnp.broadcast_to(decay_D.astype(jnp.float32), k.shape)
        tokens = (fall, k, v, jnp.ones_like(v))
        behind = lax.associative_scan(combine, tokens, axis=1)
        behind = combine(tuple(s[:, None] for s in state), behind)
        before = tuple(jnp.concatenate((s[:, None], b[:, :-1]), 1) for s, b in zip(state, behind, strict=True))
        _, _, top, bottom = combine(before, (jnp.zeros_like(k), k + first_D, v, jnp.ones_like(v)))
        return tuple(b[:, -1] for b in behind), (top / bottom).astype(v_BTD.dtype)

    zeros = jnp.zeros((v_BTD.shape[0], v_BTD.shape[2]), jnp.float32)
    state = (zeros, zeros + _LEAST, zeros, zeros)
    return over_segments(step, state, (k_BTD, v_BTD), _segment_of(v_BTD))


def short_convolution(x_BDT: Array, weight_DK: Array, *bias_D: Array) -> Array:
    """Each channel's causal convolution, as a sum of shifted rows: [B, D, T]."""
    # XLA's partitioner may gather the whole batch for the gradient of a convolution's weight, but not of a product's
    K, T = weight_DK.shape[1], x_BDT.shape[2]
    filled = jnp.pad(x_BDT, ((0, 0), (0, 0), (K - 1, 0)))
    total: Any = sum(filled[:, :, i : i + T].astype(jnp.float32) * weight_DK[:, i, None] for i in range(K))
    for bias in bias_D:
        total = total + bias[:, None]
    return total.astype(x_BDT.dtype)


def _segment_of(array: Array) -> int:
    return min(_SEGMENT, array.shape[1])


def _recurrence(a: Array, x: Array, state: Array) -> Array:
    """The states h' = a h + x behind every token of a segment, [B, S, …], from the state before it."""

    def combine(early: tuple[Array, Array], late: tuple[Array, Array]) -> tuple[Array, Array]:
        return early[0] * late[0], late[0] * early[1] + late[1]

    fall, states = lax.associative_scan(combine, (a, x), axis=1)
    return states + fall * state[:, None]
