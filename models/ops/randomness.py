"""Random draws of a model in training: dropout, router jitter, sampling routers.

Each draw is a function of a key and of its site (:mod:`shardwright.models.ops.random_bits`). The caller makes a key for
each step and micro-batch. A key for each decoder layer is derived from it, and sites are numbered in the order in which
a layer, or the rest of the model, runs. So a mask depends on nothing else: not on the mesh, on scan or remat, nor on
which attention draws it.

Models draw as usual, with `F.dropout` or `Tensor.uniform_`; inside :func:`drawing` these are replaced, because torch's
own generators would draw anew in the backward's recomputation. An operation without a replacement is refused, by name.
"""

from __future__ import annotations

import contextlib
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
import torch_xla.debug.metrics as met
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwright.models.ops import random_bits
from shardwright.models.ops.during import during

_active: ContextVar[Draws | None] = ContextVar("draws", default=None)


class UnknownDraw(ValueError):
    """A model drew random numbers by operation ``what`` in a place or way that has no replacement."""

    def __init__(self, what: str, why: str) -> None:
        super().__init__(f"{what}{_place()}: {why}")


class Draws(TorchFunctionMode):
    """Replaces, while active, the operations by which models draw."""

    def __init__(self, key: Tensor | None) -> None:
        super().__init__()
        self.key = key  # int32 [2], on the device that computes; None: a draw is an error
        self.drawn = False  # whether there was a draw
        self.layer: int | None = None  # the decoder layer that runs without `Draws` of its own
        self._sites: Counter[int | None] = Counter()

    def site(self, what: str, device: torch.device | str) -> tuple[Tensor, int]:
        """Return the key and the number of a new site, where ``what`` draws on ``device``."""
        key, number = self._given(what), self._sites[self.layer]
        if torch.device(device).type != key.device.type:
            raise UnknownDraw(what, f"it draws on {torch.device(device).type}, and the step runs on {key.device.type}")
        self._sites[self.layer] += 1
        return key if self.layer is None else random_bits.layer_keys(key, self.layer, 1)[0], number

    def layer_keys(self, first: int, count: int) -> Tensor:
        """Return the keys, int32 [count, 2], of the layers from ``first`` on, each for a :class:`Draws` of its own."""
        return random_bits.layer_keys(self._given("a layer that draws"), first, count)

    def _given(self, what: str) -> Tensor:
        self.drawn = True
        if self.key is None:
            raise UnknownDraw(what, "nothing is random in evaluation, nor where no key is given")
        return self.key

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


@contextlib.contextmanager
def drawing(key: Tensor | None = None) -> Iterator[Draws]:
    """Inside, the model draws from ``key``, int32 [2]; None: a draw is an error (:class:`UnknownDraw`)."""
    draws = Draws(key)
    with during(_active, draws), draws:
        yield draws


def active() -> Draws:
    """The innermost :func:`drawing`."""
    return _active.get() or Draws(None)


def set_layer(index: int | None) -> None:
    """Make later draws belong to decoder layer ``index``; None: to no layer."""
    active().layer = index


class OtherDraws:
    """Detects draws from torch's own generators since its creation, on the host and for the device."""

    def __init__(self) -> None:
        self._host, self._device = torch.get_rng_state(), _calls()

    def check(self) -> None:
        if not torch.equal(self._host, torch.get_rng_state()):
            raise UnknownDraw("torch's generator on the host", "its state has changed")
        for counter, count in _calls().items():
            name = counter.rpartition("::")[2]
            if count > self._device.get(counter, 0) and _is_random(name):
                raise UnknownDraw(name, "it has no replacement that draws the same in forward and backward")


def _is_random(name: str) -> bool:
    operation = getattr(torch.ops.aten, name, None)
    overloads = [getattr(operation, overload) for overload in operation.overloads()] if operation else []
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def _calls() -> dict[str, int]:
    """Count how often torch_xla has traced each operation, by a name such as ``xla::bernoulli``."""
    return {name: met.counter_value(name) for name in met.counter_names() if "::" in name}


def _place() -> str:
    """The caller's place in the model's code, such as `` at modeling_opt.py:377``; may be empty."""
    frames = [frame for frame in traceback.extract_stack() if "modeling_" in frame.filename]
    return f" at {frames[-1].filename.rpartition('/')[2]}:{frames[-1].lineno}" if frames else ""


def _dropout(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    if not training or p == 0:
        return x
    out = random_bits.dropout(x, *active().site("dropout", x.device), float(p))
    return x.copy_(out) if inplace else out


def _uniform_(x: Tensor, low: float = 0.0, high: float = 1.0, *, generator: None = None) -> Tensor:
    return x.copy_(low + (high - low) * _numbers("uniform_", x.shape, x.device, generator))


def _exponential_(x: Tensor, lambd: float = 1.0, *, generator: None = None) -> Tensor:
    numbers = _numbers("exponential_", x.shape, x.device, generator)
    return x.copy_(torch.log1p(-numbers.clamp(min=2**-25)) / -lambd)  # above 0: models take its logarithm


def _rand_like(x: Tensor, *, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
    return _numbers("rand_like", x.shape, options.get("device") or x.device).to(dtype or x.dtype)


def _rand(*size: Any, dtype: torch.dtype | None = None, generator: None = None, **options: Any) -> Tensor:
    shape = torch.Size(size[0] if size and not isinstance(size[0], int) else size)
    numbers = _numbers("rand", shape, options.get("device") or torch.get_default_device(), generator)
    return numbers.to(dtype or torch.get_default_dtype())


def _numbers(what: str, shape: torch.Size, device: torch.device | str, generator: None = None) -> Tensor:
    if generator is not None:
        raise UnknownDraw(what, "it is given a generator of its own")
    key, site = active().site(what, device)
    return random_bits.uniform(key, shape, site)


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; with dropout, which torch draws inside, it is written out."""
    if dropout_p == 0:
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = (t.repeat_interleave(query.shape[-3] // t.shape[-3], dim=-3) for t in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if attn_mask is not None:
        least = torch.finfo(scores.dtype).min
        scores = torch.where(attn_mask, scores, least) if attn_mask.dtype == torch.bool else scores + attn_mask
    return _dropout(torch.softmax(scores, dim=-1), dropout_p) @ value


_REPLACED: dict[Any, Callable[..., Tensor]] = {
    F.dropout: _dropout,
    F.scaled_dot_product_attention: _attention,
    Tensor.uniform_: _uniform_,
    Tensor.exponential_: _exponential_,
    torch.rand_like: _rand_like,
    torch.rand: _rand,
}
