"""Causal attention for transformers' attention interface, under the name ``portable``.

It is registered once, at import. How the kernel's inputs lie on the mesh is said by an attribute of the attention
module (:func:`bind`), so models with different layouts can live in one process. A graph built for a TPU gets the Pallas
kernel of :mod:`models.attention.splash`, any other the tensor operations of :mod:`models.attention.portable`.
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
from models.attention.portable import Scoring, portable
from models.jax_call import target
from models.randomness import active

# The name stays out of transformers' mask registry, so that models build no mask: building one waits for the device.
# An `attention_mask` given to a model is therefore not seen here: padding is said by `segment_ids`.
NAME = "portable"
ONE_DEVICE = splash.KernelLayout()
# the attribute of a module that holds its kernel layout
_LAYOUT = "_shardwright_kernel_layout"
# keyword arguments that reach every attention function and change no score
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


def bind(model: nn.Module, layout: splash.KernelLayout) -> None:
    """Make the attention ``portable`` of ``model`` run its kernel under ``layout``. A copy of the model keeps it.

    A model that is not bound runs as on one device.
    """
    for module in model.modules():  # all of them: families don't mark which of their modules are attention
        setattr(module, _LAYOUT, layout)


@contextmanager
def masks_without_reads() -> Iterator[None]:
    """Inside, transformers builds the masks of its own attention functions without reading a value back.

    Otherwise it asks the device on every step whether positions are packed and whether anything is padding. That costs
    a graph of its own and a transfer. Under a compiler it does not ask, so this says that there is one.
    """
    own = masking_utils.is_tracing  # monkeypatch, semi-private: transformers/masking_utils.py, transformers 5.23
    masking_utils.is_tracing = lambda *_: True
    try:
        yield
    finally:
        masking_utils.is_tracing = own


@dataclass(frozen=True)
class Attention:
    """Causal self-attention as transformers calls it; softmax in float32, result in the query's dtype.

    A graph built for a TPU (:func:`models.jax_call.target`) gets the kernel. Any other graph, and tensors that are not
    on XLA, get the portable operations; so does dropout, which the kernel has not. Both support all else that
    :meth:`__call__` accepts, at any length and head dimension.

    Args:
        layout: how the kernel's inputs lie on the mesh. The partitioner cannot split a kernel: without a layout every
            device would do all of the work. The portable operations don't use it.
        interpret: for tests. Not 0: the kernel runs on any platform, by Pallas's interpreter, in blocks of so many
            tokens.
    """

    layout: splash.KernelLayout = ONE_DEVICE
    interpret: int = 0

    # transformers' signature of an attention function
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
            module: the attention layer. Its ``is_causal`` and ``config`` are checked.
            query: ``[batch, query heads, sequence, head dimension]``.
            key: ``[batch, key heads, sequence, head dimension]``; key heads divide query heads.
            value: ``[batch, key heads, sequence, value dimension]``.
            attention_mask: must be None. Padding and packing are said by ``segment_ids``.
            scaling: factor on the scores; None: ``head dimension ** -0.5``.
            dropout: the probability with which a weight is left out, and the others divided by 1 minus it. Above 0, the
                call must stand inside :func:`models.randomness.drawing`.
            segment_ids: ``[batch, sequence]`` integers, a keyword argument of the model. Tokens attend causally
                within their own id. 0 is padding: rows of zeros, with zero gradients. None: one segment, no padding.
            softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
            s_aux: ``[query heads]``, logits that take part in the softmax and have no value (GPT-OSS's sinks).
            **kwargs: ``sliding_window``: how many positions a token sees, itself included (None or 0: all).

        Returns:
            ``[batch, sequence, query heads, value dimension]``, and None for the attention weights.

        Raises:
            ValueError: something was asked that changes the numbers and is not supported.
        """
        _refuse_unsupported(module, query, key, attention_mask, segment_ids, kwargs)
        random_key, site = active().site("attention dropout", query.device) if dropout else (None, 0)
        scoring = Scoring(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap,
            kwargs.get("sliding_window") or None,
            float(dropout),
            site,
        )
        if dropout or query.device.type != "xla" or not (self.interpret or target() == "tpu"):
            return portable(query, key, value, segment_ids, s_aux, scoring, random_key), None
        settings = splash.Settings(scoring, self.layout, self.interpret)
        return splash.attend(query, key, value, segment_ids, s_aux, settings).transpose(1, 2), None


def _bound(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
    """The attention function that transformers calls: :class:`Attention` under the module's own layout."""
    return Attention(getattr(module, _LAYOUT, ONE_DEVICE))(module, *args, **kwargs)


AttentionInterface.register(NAME, _bound)


def _refuse_unsupported(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    attention_mask: torch.Tensor | None,
    segment_ids: torch.Tensor | None,
    kwargs: dict[str, Any],
) -> None:
    """Raise ValueError for what :class:`Attention` was asked and does not support; what changes no number passes."""
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
    # some families say their window by the mask alone, and none is built here
    for name in sorted({"attention_chunk_size", "sliding_window"} - kwargs.keys()):
        limit = getattr(getattr(module, "config", None), name, None)
        checks.append((limit and limit < length, f"{name}={limit} said by a mask", f"use at most {limit} positions"))
    for wrong, found, instead in checks:
        if wrong:
            raise ValueError(f"attention {NAME!r} does not support {found}: {instead}")
