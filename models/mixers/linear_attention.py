"""Linear attention whose state decays: Mamba-2's state space (SSD, arXiv:2405.21060) and lightning attention.

The state S of a head, [N, P], goes from token to token as S' = exp(g) S + k vᵀ, and a token's output is S'ᵀ q. Inside
a segment this is attention without a softmax, between segments a matrix product with the state.

Shape suffixes: B rows, T tokens, S tokens of a segment, H heads, G groups of heads that share queries and keys, R heads
of a group, N width of keys (the state's size), P width of values.
"""

from shardwright.models.mixers import sums
from shardwright.models.mixers.segments import over_segments
from shardwright.models.ops.jax_call import Array, jnp

_SEGMENT = 128  # tokens


def decayed_attention(v_BTHP: Array, q_BTGN: Array, k_BTGN: Array, g_BTH: Array, scale_BTH: Array) -> Array:
    """Return every token's output, [B, T, H, P], computed in float32.

    ``g`` is the logarithm of each token's decay, at most 0; ``scale`` a factor on its value (Mamba's step size).
    """
    B, T, H, P = v_BTHP.shape
    G, N = k_BTGN.shape[2:]
    grouped = (B, T, G, H // G)
    v, g, scale = v_BTHP.reshape(*grouped, P), g_BTH.reshape(grouped), scale_BTH.reshape(grouped)
    state = jnp.zeros((B, G, H // G, N, P), jnp.float32)
    segment = min(_SEGMENT, 1 << (T - 1).bit_length())
    return over_segments(_step, state, (v, q_BTGN, k_BTGN, g, scale), segment).reshape(B, T, H, P)


def _step(state_BGRNP: Array, arrays: tuple[Array, ...]) -> tuple[Array, Array]:
    dtype = arrays[0].dtype
    v_BSGRP, q_BSGN, k_BSGN, g, scale = (a.astype(jnp.float32) for a in arrays)
    v_BSGRP = v_BSGRP * scale[..., None]
    g_BGRS = jnp.moveaxis(g, 1, -1)
    scores = jnp.einsum("bsgn,btgn->bgst", q_BSGN, k_BSGN)[:, :, None] * jnp.exp(sums.between(g_BGRS))
    inside = jnp.einsum("bgrst,btgrp->bsgrp", scores, v_BSGRP)
    since = jnp.moveaxis(jnp.exp(sums.until(g_BGRS)), -1, 1)[..., None]
    before = jnp.einsum("bsgn,bgrnp->bsgrp", q_BSGN, state_BGRNP) * since
    left = jnp.moveaxis(jnp.exp(sums.after(g_BGRS)), -1, 1)[..., None]
    added = jnp.einsum("btgn,btgrp->bgrnp", k_BSGN, v_BSGRP * left)
    return state_BGRNP * since[:, -1][..., None] + added, (inside + before).astype(dtype)
