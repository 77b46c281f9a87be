"""Causal attention for transformers' attention interface, under the names ``shardwright`` and ``shardwright_masked``.

Both are registered once, at import. Under the first, models build no mask, and numbers describe causality, windows and
chunks. Under the second they build transformers' own masks, ``[batch, 1, sequence, keys]``, and may change them: an
indexer's choice of keys, a bias of their own, keys beyond the sequence's. An attribute of the attention module holds
the layout of the kernel's inputs (:func:`bind`), so models with different layouts can live in one process.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel, masking_utils

from shardwright.models.attention import pieces, ring, splash
from shardwright.models.attention.across_layers import CLASSES, across_layers
from shardwright.models.attention.block_indexer import chosen_keys
from shardwright.models.attention.kernel_layout import KernelLayout
from shardwright.models.attention.long_rope import scaled_by_length
from shardwright.models.attention.portable import Scoring, portable
from shardwright.models.attention.temperature import by_position
from shardwright.models.ops.during import during
from shardwright.models.ops.randomness import active

# The first name stays out of transformers' mask registry, so that models build no mask, whose size is the sequence's
# square. An `attention_mask` given to a model therefore doesn't arrive here: `segment_ids` describe padding.
NAME = "shardwright"
MASKED = "shardwright_masked"
ONE_DEVICE = KernelLayout()
# attributes of a module: its kernel layout, and the chunk size of its layer (0: no chunks)
_LAYOUT = "_shardwright_kernel_layout"
# fields of a config: how many positions a token sees, and in what pieces of a row
REACHES = ("sliding_window", "attention_chunk_size")
_CHUNK = "_shardwright_chunk"
# class of a module → its forward under our attention: the same numbers, in operations that XLA can run
FORWARDS: dict[str, Callable[..., Any]] = {
    "Qwen4ExpTextQSAIndexer": chosen_keys,
    "Llama4TextDecoderLayer": by_position,
    "PhimoeRotaryEmbedding": scaled_by_length,
}
# keyword arguments that :class:`Attention` understands, or that reach every attention function and change no score
_KNOWN = {
    *("attention_mask", "segment_ids", "sliding_window", "position_bias", "indices", "block_indices", "is_causal"),
    *("output_attentions", "position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict"),
    *("deterministic", "num_items_in_batch", "output_hidden_states", "output_router_logits"),
}
# the documents of the model's rows, for the masks that it builds
_segments: ContextVar[Tensor | None] = ContextVar("segments", default=None)


class Unsupported(ValueError):
    """A call of attention asked for something that changes its numbers and that ours lacks."""


def choose(model: PreTrainedModel, name: str) -> None:
    """Make ``model`` run the attention ``name``, ours or transformers' own."""
    model.set_attn_implementation(name)
    mark_chunks(model.modules())
    for module in model.modules():
        family: Any = type(module)
        if name in (NAME, MASKED) and family.__name__ in FORWARDS:
            module.__class__ = _with_our_forward(family)  # not an attribute: equal layers stay equal


@functools.cache
def _with_our_forward(family: Any) -> Any:
    forward = FORWARDS[family.__name__]
    return family if family.forward is forward else type(family.__name__, (family,), {"forward": forward})


def mark_chunks(modules: Iterable[Any]) -> None:
    """Store on each module of a layer its chunk size, which no argument carries; it also distinguishes layers."""
    for module in modules:
        config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
        types = getattr(config, "layer_types", None)
        if config is not None and types is not None and layer is not None and layer < len(types):
            setattr(module, _CHUNK, config.attention_chunk_size if types[layer] == "chunked_attention" else 0)


def bind(model: nn.Module, layout: KernelLayout) -> None:
    """Make our attention of ``model``, and of its copies, run its kernel under ``layout``; unbound: on one device."""
    for module in model.modules():  # all: families don't mark which modules are attention
        setattr(module, _LAYOUT, layout)


@contextmanager
def masks_without_reads(segment_ids: Tensor | None = None) -> Iterator[None]:
    """Inside, transformers builds masks without reading values back; those of ``portable_masked`` have ``segment_ids``.

    These are ``[batch, sequence]``, as the model gets them; None: one segment a row, no padding.
    """
    # Otherwise it asks the device on every step whether positions are packed and whether anything is padding: a graph
    # of its own and a transfer. It does not ask under a compiler, so this pretends to be one.
    own = masking_utils.is_tracing  # monkeypatch, semi-private: transformers/masking_utils.py, transformers 5.23
    masking_utils.is_tracing = lambda *_: True
    try:
        with during(_segments, segment_ids):
            yield
    finally:
        masking_utils.is_tracing = own


@dataclass(frozen=True)
class Attention:
    """Causal self-attention with transformers' signature; softmax in float32, result in the query's dtype.

    Tensors on XLA get the kernel. Others get the portable operations, and so do dropout and biases, which the kernel
    lacks. Both support everything else that :meth:`__call__` accepts, at any length and head dimension.
    """

    layout: KernelLayout = ONE_DEVICE  # of the kernel's inputs, which the partitioner can't split
    masked: bool = False  # masks are accepted, and alone decide what a token sees: memory quadratic in the sequence

    # transformers' signature of an attention function
    def __call__(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        segment_ids: Tensor | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        sinks: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Return one layer's attention, ``[batch, sequence, query heads, value dimension]``, and None for the weights.

        Args:
            module: the attention layer. Its ``is_causal`` and ``config`` are checked.
            query, key, value: ``[batch, query heads, sequence, head dimension]``, ``[batch, key heads, sequence, head
                dimension]`` and ``[batch, key heads, sequence, value dimension]``; key heads divide query heads.
            attention_mask: ``[batch or 1, query heads or 1, sequence, keys]``, added to the scores (or bool: whether a
                query sees a key); keys may outnumber the sequence. None unless ``masked``.
            scaling: factor on the scores; None: ``head dimension ** -0.5``.
            dropout: the probability of dropping a weight, as in `Scoring`. Above 0, the call must be inside
                :func:`shardwright.models.ops.randomness.drawing`.
            segment_ids: ``[batch, sequence]`` integers, a keyword argument of the model. Tokens attend causally within
                their own id. 0 is padding: rows of zeros, with zero gradients. None: one segment, no padding.
            softcap: scores become ``softcap * tanh(scores / softcap)`` (Gemma 2).
            s_aux, sinks: ``[query heads]`` (GPT-OSS), or ``[batch, query heads, sequence, 1]``, one for each query
                (Inkling 2): logits that take part in the softmax and have no value.
            **kwargs: ``sliding_window``: how many positions a token sees, itself included (None or 0: all).
                ``position_bias``: an additive mask, on top of causality and the window; it gets a gradient.
                ``indices``: ``[batch, sequence, n]``, the only keys that a query sees (an indexer's choice).
                ``block_indices``: ``[batch, heads, sequence, n]``, likewise blocks of ``module.indexer.block_size``
                keys for each group of heads; -1 is none.

        Raises:
            Unsupported: the call asks for something that changes the numbers and is not supported.
        """
        if type(module).__name__ in CLASSES:
            return across_layers(query, key, value, scaling), None
        asked = {**kwargs, "segment_ids": segment_ids, "attention_mask": attention_mask}
        _refuse_unsupported(module, query, key, asked, self.masked)
        random_key, site = active().site("attention dropout", query.device) if dropout else (None, 0)
        by_mask = attention_mask is not None
        scoring = Scoring(
            query.shape[-1] ** -0.5 if scaling is None else float(scaling),
            softcap,
            None if by_mask else kwargs.get("sliding_window") or None,
            None if by_mask else getattr(module, _CHUNK, 0) or None,
            causal=not by_mask,
            dropout=float(dropout),
            site=site,
        )
        bias, settings = _bias(module, query, key.shape[2], asked), splash.KernelSettings(scoring, self.layout)
        if self.layout.sequence_axis is not None and not self.masked:  # masks cover whole rows
            if dropout or bias is not None or sinks is not None:
                raise Unsupported(f"attention {NAME!r} has no dropout, biases or sinks of a query in split rows")
            if query.device.type == "xla":
                return ring.attend((query, key, value), segment_ids, s_aux, settings).transpose(1, 2).contiguous(), None
            count = self.layout.sequence_shards
            query, key, value = (pieces.from_pieces(t, count, 2) for t in (query, key, value))
            segment_ids = None if segment_ids is None else pieces.from_pieces(segment_ids, count, 1)
            return pieces.to_pieces(portable(query, key, value, segment_ids, s_aux, scoring), count, 1), None
        if query.device.type != "xla" or dropout or bias is not None or sinks is not None:
            s_aux = sinks if s_aux is None else s_aux
            return portable(query, key, value, segment_ids, s_aux, scoring, random_key, bias), None
        # contiguous as of transformers' own functions: some layers view the result as rows
        return splash.attend((query, key, value), segment_ids, s_aux, settings).transpose(1, 2).contiguous(), None


def _bound(masked: bool, module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return Attention(getattr(module, _LAYOUT, ONE_DEVICE), masked)(module, *args, **kwargs)


def _mask(*args: Any, **kwargs: Any) -> Tensor | None:
    """The mask of transformers' eager attention, with the segments of :func:`masks_without_reads`."""
    mask, segments = masking_utils.eager_mask(*args, **kwargs), _segments.get()
    if mask is None or segments is None:
        return mask
    same = (segments[:, :, None] == segments[:, None, :]) & (segments != 0)[:, :, None]
    return torch.where(same[:, None], mask, torch.finfo(mask.dtype).min)


AttentionInterface.register(NAME, functools.partial(_bound, False))
AttentionInterface.register(MASKED, functools.partial(_bound, True))
AttentionMaskInterface.register(MASKED, _mask)


def _bias(module: nn.Module, query: Tensor, keys: int, asked: dict[str, Any]) -> Tensor | None:
    """Combine masks, biases and chosen keys into one bias, ``[batch or 1, query heads or 1, sequence, keys]``."""
    mask, bias, lowest = asked["attention_mask"], asked.get("position_bias"), torch.finfo(query.dtype).min
    indices, block_indices = asked.get("indices"), asked.get("block_indices")
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.where(mask, 0.0, lowest).to(query.dtype)
    if bias is not None:
        mask = bias if mask is None else mask + bias
    seen = None if indices is None else _named(indices.unsqueeze(1), keys)
    if block_indices is not None:
        indexer: Any = module.indexer
        size: int = indexer.block_size
        blocks = _named(block_indices, -(-keys // size)).repeat_interleave(query.shape[1] // block_indices.shape[1], 1)
        seen = blocks.repeat_interleave(size, -1)[..., :keys]
    if seen is None:
        return mask
    return torch.where(seen, query.new_zeros(()) if mask is None else mask, lowest)


def _named(index: Tensor, count: int) -> Tensor:
    """Mark which of ``count`` numbers are in the last dimension of ``index``, where -1 is none."""
    named = torch.zeros(*index.shape[:-1], count + 1, dtype=torch.int32, device=index.device)
    index = torch.where(index < 0, count, index).long()
    return named.scatter(-1, index, torch.ones_like(index, dtype=torch.int32))[..., :count] > 0


def _refuse_unsupported(module: nn.Module, query: Tensor, key: Tensor, kwargs: dict[str, Any], masked: bool) -> None:
    """Raise :class:`Unsupported` for a feature that :class:`Attention` lacks, unless it changes no number."""
    mask, segment_ids, causal = kwargs["attention_mask"], kwargs["segment_ids"], kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    (batch, heads, length, _), (_, key_heads, keys, _) = query.shape, key.shape
    segments = "pass segment_ids [batch, sequence]: 0 for padding, one id for each packed sequence"
    cached, uneven = keys != length and (mask is None or segment_ids is not None), heads % key_heads
    misshapen = segment_ids is not None and list(segment_ids.shape) != [batch, length]
    checks = [
        (mask is not None and not masked, "an attention mask", segments),
        (not causal and mask is None, "attention that is not causal", "use 'eager' or 'sdpa' for this model"),
        (cached, f"{length} queries against {keys} keys (a cache)", "pass use_cache=False, or generate with 'sdpa'"),
        (uneven, f"{heads} query heads over {key_heads} key heads", "the one must be a multiple of the other"),
        (misshapen, f"segment_ids that are not {[batch, length]}", "give one id for each token"),
        (kwargs.get("output_attentions"), "output_attentions", "use 'eager', which holds the weights"),
    ]
    for name in sorted(kwargs.keys() - _KNOWN):
        checks.append((kwargs[name] is not None, repr(name), "it may change the scores; use 'eager' for this model"))
    # some families express their window only as a mask
    window, chunk = REACHES
    unsaid = {window} - kwargs.keys() | ({chunk} if not hasattr(module, _CHUNK) else set())
    for name in sorted(unsaid):
        limit = getattr(getattr(module, "config", None), name, None)
        found = mask is None and limit and limit < length
        checks.append((found, f"{name}={limit} said by a mask", f"use at most {limit} positions"))
    for wrong, found, instead in checks:
        if wrong:
            raise Unsupported(f"attention {NAME!r} does not support {found}: {instead}")
