"""Causal attention for transformers' attention interface: a Pallas kernel on TPU, plain tensor operations elsewhere.

On TPU it is the kernel of :mod:`models.attention.splash`. Everything below `Attention` is the portable one, whose memory is
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

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, masking_utils

from models.attention import splash
from models.attention.portable import Options, portable
from models.jax_call import target

NAME = "portable"
ONE_DEVICE = splash.KernelLayout()
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


def register_attention(layout: splash.KernelLayout | None = None) -> str:
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

    layout: splash.KernelLayout = ONE_DEVICE
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
        options = Options(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap,
            kwargs.get("sliding_window") or None,
        )
        if query.device.type != "xla" or not (self.interpret or target() == "tpu"):
            return portable(query, key, value, segment_ids, s_aux, options), None
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
