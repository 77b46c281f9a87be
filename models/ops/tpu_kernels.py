"""A TPU's kernels: jax's splash attention and megablox (Gale et al., arXiv:2211.15841), in Pallas.

The splash attention functions called here are private to jax 0.7.1, at which jax is pinned. The public function would
run the forward a second time to differentiate, and is slow to make its lists of blocks
(:mod:`shardwright.models.attention.splash_masks`).
"""

import functools
from collections.abc import Sequence
from typing import Any

from torch_xla.experimental import stablehlo_custom_call

# configures jax: it must come before jax itself
from shardwright.models.ops.jax_call import Array, jax

# isort: split
from jax.experimental import pallas as pl
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm

# semi-private: splash_attention_kernel.py there, jax 0.7.1
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

# a tile's rows and two widths
Tiling = tuple[int, int, int]

COMPUTE_DTYPE = "bfloat16"
# semi-private: `_opoverload` of torch/_library/custom_ops.py, torch 2.9; both operations are torch_xla's
TO_HOST = stablehlo_custom_call.place_to_host._opoverload
TO_DEVICE = stablehlo_custom_call.place_to_device._opoverload

INTERPRETED = False  # tests have Pallas interpret the kernels


def attention(
    tensors: Sequence[Array], segments: Any, sinks: Array | None, mask: Any, softcap: float | None
) -> tuple[Array, Array]:
    """Return the output [B, H, S, E] of query, key and value, and each row's logsumexp [B, H, S].

    They are [B, H, S, D], multiplied by the scale, [B, K, S, D] and [B, K, S, E]. ``segments`` has those of queries (q)
    and keys (kv), [B, S] each; None: there is one. ``sinks``, [H] float32, are logits that take part in each row's sum.
    The blocks of ``mask``, a `shardwright.models.attention.splash_masks.Mask`, divide S. For ``softcap`` see `Scoring`.
    """
    block, compute = mask.sizes.block, mask.sizes.compute
    run = functools.partial(
        splash._splash_attention_forward,
        mask.queries,
        mask_value=splash.DEFAULT_MASK_VALUE,
        is_mqa=False,
        block_sizes=splash.BlockSizes(block_q=block, block_kv=block, block_kv_compute=compute),
        residual_checkpoint_name=None,
        save_residuals=True,
        mask_function=mask.function,
        attn_logits_soft_cap=softcap,
        interpret=INTERPRETED,
    )
    axes = (0, 0, 0, None if segments is None else 0, None)
    out, (logsumexp,) = jax.vmap(run, in_axes=axes)(*tensors, segments, sinks)
    return out, logsumexp


def attention_backward(
    tensors: Sequence[Array], rows: Sequence[Array], grad_out: Array, segments: Any, mask: Any, softcap: float | None
) -> tuple[Array, Array, Array]:
    """Return the gradients of query, key and value.

    ``rows`` are each query's logsumexp, and the dot product of its output with the output's gradient.
    """

    def run(tensors: Any, rows: Any, grad_out: Array, segments: Any) -> tuple[Array, Array, Array]:
        logsumexp, dot = rows
        # the sinks are in the logsumexp already
        arguments = (*tensors, segments, None, logsumexp, grad_out, dot)
        common: dict[str, Any] = {
            **dict.fromkeys(("bq", "bkv"), mask.sizes.block),
            **dict.fromkeys(("q_layout", "k_layout", "v_layout"), splash.QKVLayout.HEAD_DIM_MINOR),
            "is_mqa": False,
            "mask_value": splash.DEFAULT_MASK_VALUE,
            "attn_logits_soft_cap": softcap,
            "mask_function": mask.function,
            "interpret": INTERPRETED,
        }
        _, grad_key, grad_value = splash._splash_attention_bwd_dkv(
            *arguments,
            bkv_compute=mask.sizes.compute,
            # the fused kernel writes a gradient of the query for each block of keys: memory quadratic in the sequence
            use_fused_bwd_kernel=False,
            mask_info=mask.keys,
            **common,
        )
        grad_query = splash._splash_attention_bwd_dq(*arguments, mask_info=mask.queries, **common)
        return grad_query, grad_key, grad_value

    return jax.vmap(run)(tensors, rows, grad_out, segments)


def grouped_product(
    x_RK: Array, w_G: Array, sizes_G: Array, tiling: Tiling, part: Any = None, *, contract_last: bool
) -> Array:
    """See `shardwright.models.experts.grouped_matmul.multiply`."""
    first, into = part or (None, None)
    return gmm(x_RK, w_G, sizes_G, x_RK.dtype, tiling, first, into, contract_last, INTERPRETED)


def grouped_outer(a_RK: Array, b_RN: Array, sizes_G: Array, tiling: Tiling, into_GKN: Array | None) -> Array:
    """See `shardwright.models.experts.grouped_matmul.outer`."""
    dtype = a_RK.dtype if into_GKN is None else into_GKN.dtype
    return tgmm(a_RK.T, b_RN, sizes_G, dtype, tiling, existing_out=into_GKN, interpret=INTERPRETED)


def unwritten(shape: tuple[int, ...], dtype: Any, after: Array) -> Array:
    """An array of arbitrary entries, for callers that write every entry they read."""
    # any small array of the loop that uses the result keeps it inside the loop, where no turn copies it
    made, anywhere = jax.ShapeDtypeStruct(shape, dtype), pl.BlockSpec(memory_space=pl.ANY)
    return pl.pallas_call(lambda *refs: None, made, in_specs=[anywhere], out_specs=anywhere)(after)
