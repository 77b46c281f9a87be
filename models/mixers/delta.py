"""The gated delta rule: Gated DeltaNet (arXiv:2412.06464) and, with a decay for each channel, Kimi Delta Attention
(arXiv:2510.26692).

The state S of a head, [K, V], goes from token to token as S' = D S + β k (v − (D S)ᵀ k)ᵀ with D = exp(g), and a token's
output is S'ᵀ q. Inside a chunk the corrections of all tokens are the solution of one unit lower triangular system.

Shape suffixes: B rows, T tokens, C tokens of a chunk, N chunks of a segment, G groups of heads that share queries and
keys, R heads of a group, K and V widths of keys and values.
"""

import functools

from shardwright.models.mixers import sums
from shardwright.models.mixers.segments import over_segments
from shardwright.models.ops.jax_call import Array, jnp, lax

_CHUNK = 64
_CHUNKS = 8  # in a segment: they are solved side by side and share one kept state
# a chunk's corrections build on each other: a TPU's usual single pass in bfloat16 loses them
_exactly = functools.partial(jnp.einsum, precision=lax.Precision.HIGHEST)


def delta_rule(v_BTHV: Array, q_BTGK: Array, k_BTGK: Array, g: Array, beta_BTH: Array, *, normalise: bool) -> Array:
    """Return every token's output, [B, T, H, V], computed in float32.

    ``g`` is the logarithm of each token's decay, at most 0: [B, T, H], or [B, T, H, K] for each channel of the keys.
    With ``normalise`` queries and keys are made unit vectors first.
    """
    B, T, H, V = v_BTHV.shape
    if g.ndim == 4:  # each head decays the keys in its own way: no two share them
        q_BTGK, k_BTGK = (jnp.repeat(a, H // a.shape[2], axis=2) for a in (q_BTGK, k_BTGK))
    G, K = k_BTGK.shape[2:]
    heads = (B, T, G, H // G)
    arrays = (v_BTHV.reshape(*heads, V), q_BTGK, k_BTGK, g.reshape(*heads, -1), beta_BTH.reshape(heads))
    chunk = min(_CHUNK, 1 << (T - 1).bit_length())
    chunks = min(_CHUNKS, -(-T // chunk))
    state = jnp.zeros((B, G, H // G, K, V), jnp.float32)
    step = functools.partial(_segment, chunk=chunk, normalise=normalise)
    return over_segments(step, state, arrays, chunk * chunks).reshape(B, T, H, V)


def _segment(state: Array, arrays: tuple[Array, ...], *, chunk: int, normalise: bool) -> tuple[Array, Array]:
    dtype, (B, S) = arrays[0].dtype, arrays[0].shape[:2]

    def chunks(array: Array) -> Array:  # [B, S, G, …, X] -> [N, B, G, …, C, X]
        array = array.astype(jnp.float32).reshape(B, S // chunk, chunk, *array.shape[2:])
        return jnp.moveaxis(jnp.moveaxis(array, 2, -2), 1, 0)

    v, q, k, g = map(chunks, arrays[:4])
    beta = chunks(arrays[4][..., None])
    if normalise:
        q, k = (a * lax.rsqrt(jnp.sum(a * a, axis=-1, keepdims=True) + 1e-6) for a in (q, k))
    q, k = (q * q.shape[-1] ** -0.5)[:, :, :, None], k[:, :, :, None]  # NBG1CK
    pairs = _pairs_of_channels if g.shape[-1] > 1 else _pairs
    seen, known = pairs(q, k, g), jnp.tril(pairs(k, k, g), -1)
    solution = _inverse(beta * known)
    since, left = jnp.exp(sums.until(g, -2)), jnp.exp(sums.after(g, -2))  # NBGRCK, or NBGRC1
    xs = (v * beta, beta * k * since, q * since, k * left, since[..., -1:, :], seen, solution)
    state, out = lax.scan(_chunk, state, xs)
    return state, jnp.moveaxis(out, (0, -2), (1, 2)).reshape(B, S, *v.shape[2:4], -1).astype(dtype)


def _chunk(state: Array, xs: tuple[Array, ...]) -> tuple[Array, Array]:
    v, k_before, q, k_left, decay, seen, solution = xs
    new = _exactly("bgrcd,bgrdv->bgrcv", solution, v - jnp.einsum("bgrck,bgrkv->bgrcv", k_before, state))
    out = jnp.einsum("bgrck,bgrkv->bgrcv", q, state) + jnp.einsum("bgrcd,bgrdv->bgrcv", seen, new)
    return state * jnp.swapaxes(decay, -1, -2) + jnp.einsum("bgrck,bgrcv->bgrkv", k_left, new), out


def _pairs(q: Array, k: Array, g: Array) -> Array:
    """q · k of each token with itself and each token before it, decayed: [..., R, C, C], 0 above the diagonal."""
    return jnp.einsum("...ck,...dk->...cd", q, k) * jnp.exp(sums.between(g[..., 0]))


def _pairs_of_channels(q: Array, k: Array, g: Array) -> Array:
    """:func:`_pairs` with a decay for each channel."""
    C = q.shape[-2]
    if C <= sums.LEAF:
        decay = jnp.exp(sums.between(jnp.swapaxes(g, -1, -2)))  # KCC
        return jnp.einsum("...ck,...dk,...kcd->...cd", q, k, decay)
    # queries of the second half meet keys of the first by way of the token between them: no exponent is above 0
    late = q[..., C // 2 :, :] * jnp.exp(sums.until(g[..., C // 2 :, :], -2))
    early = k[..., : C // 2, :] * jnp.exp(sums.after(g[..., : C // 2, :], -2))
    inner = _pairs_of_channels(*(sums.halves(a, -2) for a in (q, k, g)))
    return sums.joined(inner, jnp.einsum("...ck,...dk->...cd", late, early))


def _inverse(a: Array) -> Array:
    """The inverse of 1 + ``a``, for ``a`` strictly lower triangular: [..., C, C], C a power of 2."""
    C = a.shape[-1]
    # 1 − a + a² …; over a whole chunk the series would cancel: its terms can grow like binomial coefficients
    if C <= sums.LEAF:
        power, result = -a, jnp.eye(C, dtype=a.dtype) - a
        for _ in range(max(C.bit_length() - 2, 0)):
            power = _exactly("...ij,...jk->...ik", power, power)
            result = result + _exactly("...ij,...jk->...ik", result, power)
        return result
    inner = _inverse(jnp.stack((a[..., : C // 2, : C // 2], a[..., C // 2 :, C // 2 :]), axis=-3))
    corner = _exactly("...ij,...jk->...ik", inner[..., 1, :, :], a[..., C // 2 :, : C // 2])
    return sums.joined(inner, -_exactly("...ij,...jk->...ik", corner, inner[..., 0, :, :]))
