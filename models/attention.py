"""Causal attention for transformers' attention interface: a Pallas kernel on TPU, plain tensor operations elsewhere.

On TPU it is the kernel of :mod:`models.splash`. Everything below `Attention` is the portable one, whose memory is
linear in the sequence too. Queries go in blocks against all keys. The backward computes a block's scores again instead
of saving them, so that no more than ``[batch, heads, block, sequence]`` of them lives at once, and query, key and value
are all that is saved (Rabe and Staats, "Self-attention does not need O(n^2) memory", 2021). On XLA the blocks are one
While loop: its buffers are reused, and the graph has the same size at any length.

Forward and backward are custom ops, because AOTAutograd (which traces a scanned layer) has only fake tensors to
show, and no While can be built of those: it keeps a custom op whole, and the op builds its loop when it runs.

Shape suffixes: B batch, H query heads, K key and value heads, G query heads to a key head (H = K·G), S sequence,
N blocks of queries, C queries in a block, T keys (T = S), D head dimension of query and key, E that of value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import pad
from torch_xla.experimental.scan import (
    _scan_impl_flat,
)  # semi-private: scan without its autograd, torch_xla 2.9
from transformers import AttentionInterface, masking_utils

from models import splash
from models.jax_call import target

NAME = "portable"
BLOCK = 512
ONE_DEVICE = splash.Layout()

# Keyword arguments that reach every attention function and change no score.
_HARMLESS = {
    "position_ids",
    "position_embeddings",
    "cache_position",
    "use_cache",
    "return_dict",
    "deterministic",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
}
_MASKED = torch.finfo(torch.float32).min

Tensors = Sequence[torch.Tensor]


def register(layout: splash.Layout | None = None) -> str:
    """Make this file known to transformers; the name that says so to ``model.set_attn_implementation``.

    Args:
        layout: the mesh that the model runs on; None: one device, under the name ``portable``. The registry is one for
            the process, so each layout has a name of its own. Registering a layout again changes nothing.

    The name stays out of transformers' mask registry, so that models build no mask: one wait for the device less.
    An ``attention_mask`` given to a model is therefore not seen here: say padding by ``segment_ids``.
    """
    name = NAME
    if layout is not None:
        axes = " ".join(f"{axis}={size}" for axis, size in layout.axes)
        name = f"{NAME} over {axes}, batch {layout.batch_axes}, heads {layout.head_axes}"
        name += "" if layout.order is None else f", devices {layout.order}"
    AttentionInterface.register(name, Attention(layout or ONE_DEVICE))
    return name


@contextmanager
def masks_without_reads() -> Iterator[None]:
    """Meanwhile transformers builds the masks of its own attention as under a compiler: never by reading a value back.

    It would ask the device, on every step, whether positions are packed and whether anything is padding: a graph of its
    own and a transfer.
    """
    own = masking_utils.is_tracing  # semi-private: transformers 5.23
    masking_utils.is_tracing = lambda *_: True
    try:
        yield
    finally:
        masking_utils.is_tracing = own


class _Options(NamedTuple):
    """How scores become weights: what is the same for every block."""

    scale: float
    softcap: float | None
    window: int | None


@dataclass(frozen=True)
class Attention:
    """Causal self-attention as transformers calls it; softmax in float32, result in the query's dtype.

    A graph built for a TPU (:func:`models.jax_call.target`) gets the kernel; any other, and tensors that are not on
    XLA, the portable operations. Both support all that :meth:`__call__` accepts, at any length and head dimension.

    Args:
        layout: how the kernel's inputs lie on the mesh. A kernel can't be split by the partitioner: under a mesh it
            must be told, or every device would do all of it. The portable operations need no telling.
        interpret: for tests: the kernel everywhere, run by Pallas's interpreter in blocks of so many tokens.
    """

    layout: splash.Layout = ONE_DEVICE
    interpret: int = 0

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        segment_ids: torch.Tensor | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention of one layer.

        Args:
            module: the attention layer; its ``is_causal`` and ``config`` are checked.
            query: ``[batch, query heads, sequence, head dimension]``.
            key: ``[batch, key heads, sequence, head dimension]``; key heads divide query heads.
            value: ``[batch, key heads, sequence, value dimension]``.
            attention_mask: must be None; padding and packing are said by ``segment_ids``.
            scaling: factor on the scores; None is ``head dimension ** -0.5``.
            dropout: must be 0.
            segment_ids: ``[batch, sequence]`` integers, a keyword argument of the model. 0 is padding: its rows are
                zeros, with zero gradients. Others attend causally within their own id. None: one segment, no padding.
            softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
            s_aux: ``[query heads]``, a logit that takes its share of the softmax and adds nothing (GPT-OSS's sinks).
            **kwargs: ``sliding_window``: how many positions a token sees, itself included (None or 0: all).

        Returns:
            ``[batch, sequence, query heads, value dimension]``, and None for the attention weights.

        Raises:
            ValueError: something was asked that changes the numbers and is not supported.
        """
        _refuse_unsupported(module, query, key, attention_mask, dropout, segment_ids, kwargs)
        options = _Options(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap,
            kwargs.get("sliding_window") or None,
        )
        if query.device.type != "xla" or not (self.interpret or target() == "tpu"):
            return _portable(query, key, value, segment_ids, s_aux, options), None
        splash_options = splash.Options(*options, self.interpret)
        out = splash.attend(query, key, value, segment_ids, s_aux, splash_options, self.layout)
        return out.transpose(1, 2), None


def _refuse_unsupported(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    segment_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    length = query.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    shape = [query.shape[0], length]
    checks = [
        (
            attention_mask is not None,
            "an attention mask",
            "pass segment_ids [batch, sequence]: 0 for padding, one id for each packed sequence",
        ),
        (dropout, f"attention dropout {dropout}", "set config.attention_dropout to 0"),
        (not causal, "attention that is not causal", "use 'eager' or 'sdpa' for this model"),
        (
            key.shape[2] != length,
            f"{length} queries against {key.shape[2]} keys (a cache)",
            "pass use_cache=False, or generate with 'sdpa'",
        ),
        (
            query.shape[1] % key.shape[1],
            f"{query.shape[1]} query heads over {key.shape[1]} key heads",
            "the one must be a multiple of the other",
        ),
        (
            segment_ids is not None and list(segment_ids.shape) != shape,
            f"segment_ids that are not {shape}",
            "give one id for each token",
        ),
        (kwargs.get("output_attentions"), "output_attentions", "use 'eager', which holds the weights"),
    ]
    known = _HARMLESS | {"sliding_window", "is_causal", "output_attentions"}
    for name in sorted(kwargs.keys() - known):
        checks.append((kwargs[name] is not None, repr(name), "it may change the scores; use 'eager' for this model"))
    # Some families say their window in the mask alone, which is never built here.
    for name in sorted({"attention_chunk_size", "sliding_window"} - kwargs.keys()):
        limit = getattr(getattr(module, "config", None), name, None)
        checks.append((limit and limit < length, f"{name}={limit} said by a mask", f"use at most {limit} positions"))
    for wrong, found, instead in checks:
        if wrong:
            raise ValueError(f"attention {NAME!r} does not support {found}: {instead}")


def _portable(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segment_ids: torch.Tensor | None,
    s_aux: torch.Tensor | None,
    options: _Options,
) -> torch.Tensor:
    B, H, S, D = query.shape
    K, E, C = key.shape[1], value.shape[-1], min(BLOCK, S)
    N = -(-S // C)
    rest = N * C - S  # the last block is filled up with padding
    if segment_ids is None:
        segment_ids = torch.ones(B, S, dtype=torch.int32, device=query.device)
    sinks = query.new_full((H,), -torch.inf) if s_aux is None else s_aux
    out_NBKGCE = _attention(
        pad(query, (0, 0, 0, rest)).reshape(B, K, H // K, N, C, D).permute(3, 0, 1, 2, 4, 5),
        key,
        value,
        sinks.view(K, H // K),
        segment_ids,
        torch.arange(N * C, dtype=torch.int32, device=query.device).view(N, C),
        pad(segment_ids, (0, rest)).view(B, N, C).transpose(0, 1),
        *options,
    )
    return out_NBKGCE.permute(1, 0, 4, 2, 3, 5).reshape(B, N * C, H, E)[:, :S]


# Reshaping stays outside of the two ops: torch_xla 2.9 doesn't functionalize inside a custom op, and there a slice of
# a slice, or of a permuted tensor, reads the wrong elements. Inside, a view is of a dense tensor and one deep.
@torch.library.custom_op("shardwright::attention", mutates_args=())
def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    segments: torch.Tensor,
    positions: torch.Tensor,
    query_segments: torch.Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> torch.Tensor:
    """From query ``NBKGCD``, key ``BKTD``, value ``BKTE``, sinks ``KG``, segments ``BT``, positions ``NC`` and
    query segments ``NBC`` to ``NBKGCE``."""
    options = _Options(scale, softcap, window)

    def body(constants: Tensors, carry: Tensors, x: Tensors) -> tuple[list[torch.Tensor], torch.Tensor]:
        weights_BKGCT, *_ = _weights(constants, x, options)
        out_BKGCE = torch.einsum("bkgct,bkte->bkgce", weights_BKGCT, constants[1].float())
        return [], out_BKGCE.to(query.dtype)

    return _loop(body, [key, value, sinks, segments], [], [query, positions, query_segments])[1]


@_attention.register_fake
def _(query, key, value, sinks, segments, positions, query_segments, scale, softcap, window):
    return query.new_empty(*query.shape[:-1], value.shape[-1])


@torch.library.custom_op("shardwright::attention_backward", mutates_args=())
def _attention_backward(
    grad_out: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    segments: torch.Tensor,
    positions: torch.Tensor,
    query_segments: torch.Tensor,
    scale: float,
    softcap: float | None,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """grad_out ``NBKGCE``, and what the forward got -> the gradients of query, key, value and sinks."""
    options = _Options(scale, softcap, window)

    def body(constants: Tensors, carry: Tensors, x: Tensors) -> tuple[list[torch.Tensor], torch.Tensor]:
        key_BKTD, value_BKTE, *_ = constants
        grad_key, grad_value, grad_sinks = carry
        query_BKGCD, grad_BKGCE = x[0].float(), x[-1].float()
        weights, weight_sink, slope = _weights(constants, x[:-1], options)
        grad_value = grad_value + torch.einsum("bkgct,bkgce->bkte", weights, grad_BKGCE)
        grad_weights = torch.einsum("bkgce,bkte->bkgct", grad_BKGCE, value_BKTE.float())
        mean_BKGC1 = (weights * grad_weights).sum(-1, keepdim=True)
        grad_scores = weights * (grad_weights - mean_BKGC1) * options.scale
        if slope is not None:
            grad_scores = grad_scores * slope
        grad_key = grad_key + torch.einsum("bkgct,bkgcd->bktd", grad_scores, query_BKGCD)
        grad_sinks = grad_sinks - (weight_sink * mean_BKGC1).sum((0, 3, 4))
        grad_query = torch.einsum("bkgct,bktd->bkgcd", grad_scores, key_BKTD.float())
        return [grad_key, grad_value, grad_sinks], grad_query.to(query.dtype)

    zeros = [torch.zeros_like(t, dtype=torch.float32) for t in (key, value, sinks)]
    xs = [query, positions, query_segments, grad_out]
    grads, grad_query = _loop(body, [key, value, sinks, segments], zeros, xs)
    return grad_query, grads[0].to(key.dtype), grads[1].to(value.dtype), grads[2].to(sinks.dtype)


@_attention_backward.register_fake
def _(grad_out, query, key, value, sinks, segments, positions, query_segments, scale, softcap, window):
    # new_empty, not empty_like: the gradients are dense whatever the inputs' strides
    return tuple(t.new_empty(t.shape) for t in (query, key, value, sinks))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:-3])
    ctx.options = inputs[-3:]


def _differentiate(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grads = _attention_backward(grad_out, *ctx.saved_tensors, *ctx.options)
    return (*grads, None, None, None, None, None, None)


_attention.register_autograd(_differentiate, setup_context=_save_inputs)


def _weights(
    constants: Tensors, x: Tensors, options: _Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """One block's attention weights ``BKGCT``, its sinks' ``BKGC1``, and the soft cap's slope at each score."""
    key_BKTD, _, sinks_KG, segments_BT = constants
    query_BKGCD, positions_C, segments_BC = x
    scores = torch.einsum("bkgcd,bktd->bkgct", query_BKGCD.float(), key_BKTD.float()) * options.scale
    slope = None
    if options.softcap is not None:
        tanh = torch.tanh(scores / options.softcap)
        scores, slope = tanh * options.softcap, 1 - tanh * tanh
    seen = _seen(positions_C, segments_BC, segments_BT, options.window)
    scores = torch.where(seen, scores, _MASKED)
    sinks = sinks_KG.float().view(1, *sinks_KG.shape, 1, 1)
    top = torch.maximum(scores.amax(-1, keepdim=True), sinks)
    # a row that sees nothing has every score equal to `top`: the second `where` makes its weights zeros
    weights = torch.where(seen, torch.exp(scores - top), 0.0)
    sink = torch.exp(sinks - top)
    # a row that sees something has an exponent of 0, so a total of 1 or more: the clamp changes empty rows alone
    total = (weights.sum(-1, keepdim=True) + sink).clamp(min=1.0)
    return weights / total, sink / total, slope


def _seen(
    positions_C: torch.Tensor, segments_BC: torch.Tensor, segments_BT: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Whether a query sees a key, ``[B, 1, 1, C, T]``: no later, in the window, same segment, not padding."""
    positions_T = torch.arange(segments_BT.shape[1], dtype=positions_C.dtype, device=positions_C.device)
    distance_CT = positions_C.unsqueeze(1) - positions_T
    near_CT = distance_CT >= 0
    if window is not None:
        near_CT = near_CT & (distance_CT < window)
    segments_BC1 = segments_BC.unsqueeze(2)
    same_BCT = (segments_BC1 == segments_BT.unsqueeze(1)) & (segments_BC1 != 0)
    return (near_CT & same_BCT)[:, None, None]


def _loop(
    body: Callable[[Tensors, Tensors, Tensors], tuple[list[torch.Tensor], torch.Tensor]],
    constants: Tensors,
    carry: list[torch.Tensor],
    xs: Tensors,
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Fold ``body(constants, carry, x) -> (carry, y)`` over dimension 0 of ``xs``; the ``y`` are stacked.

    On XLA this is a While. Its body may see nothing but its arguments (what a function closes over is traced anew
    inside it, with all that led to it), so the constants ride along with the carry.
    """
    count, fixed = xs[0].shape[0], len(constants)
    if count == 1 or xs[0].device.type != "xla":
        ys = []
        for i in range(count):
            carry, y = body(constants, carry, [x[i] for x in xs])
            ys.append(y)
        return carry, torch.stack(ys)

    def step(state: list[torch.Tensor], x: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        carry, y = body(state[:fixed], state[fixed:], x)
        return [*state[:fixed], *carry], [y]

    state, (ys_N,) = _scan_impl_flat(step, [*constants, *carry], list(xs))
    return list(state[fixed:]), ys_N
