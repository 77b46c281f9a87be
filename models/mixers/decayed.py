"""Linear attention whose state decays: Mamba-2's state space (SSD, arXiv:2405.21060) and lightning attention.

The state S of a head, [N, P], goes from token to token as S' = exp(g) S + k vᵀ, and a token's output is S'ᵀ q. Inside
a segment this is attention without a softmax, between segments a matrix product with the state.

Shape suffixes: B rows, T tokens, S tokens of a segment, G groups of heads that share queries and keys, R heads of a
group, N width of keys (the state's size), P width of values.
"""

from __future__ import annotations

import functools

from models.jax_call import jax
from models.mixers.segments import Array, over_segments

jnp = jax.numpy


def decayed_attention(v_BTHP: Array, q_BTGN: Array, k_BTGN: Array, g_BTH: Array, scale_BTH: Array, *, segment: int) -> Array:
    """Every token's output, [B, T, H, P], computed in float32.

    Args:
        g_BTH: the logarithm of each token's decay, at most 0.
        scale_BTH: what each token's value is multiplied by (Mamba's step size).
        segment: tokens of a segment; it changes no number but for rounding.
    """
    B, T, H, P = v_BTHP.shape
    G, N = k_BTGN.shape[2:]
    grouped = (B, T, G, H // G)
    arrays = (
        v_BTHP.reshape(*grouped, P),
        q_BTGN,
        k_BTGN,
        g_BTH.reshape(grouped),
        scale_BTH.reshape(grouped),
    )
    state = jnp.zeros((B, G, H // G, N, P), jnp.float32)
    return over_segments(_segment, state, arrays, segment).reshape(B, T, H, P)


def _segment(state_BGRNP: Array, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    dtype = arrays[0].dtype
    v, q, k, g, scale = (a.astype(jnp.float32) for a in arrays)
    v = v * scale[..., None]
    total = jnp.cumsum(g, axis=1)  # BSGR
    between = total[:, :, None] - total[:, None, :]  # BSSGR: from the second token to the first
    lower = jnp.tril(jnp.ones((v.shape[1],) * 2, bool))[None, :, :, None, None]
    decay = jnp.exp(jnp.where(lower, between, -jnp.inf))
    scores = jnp.einsum("bsgn,btgn->bstg", q, k)[..., None] * decay
    inside = jnp.einsum("bstgr,btgrp->bsgrp", scores, v)
    before = jnp.einsum("bsgn,bgrnp->bsgrp", q, state_BGRNP) * jnp.exp(total)[..., None]
    left = v * jnp.exp(total[:, -1:] - total)[..., None]  # what of each token is left at the segment's end
    state = state_BGRNP * jnp.exp(total[:, -1])[..., None, None] + jnp.einsum("btgn,btgrp->bgrnp", k, left)
    return state, (inside + before).astype(dtype)
