"""Experts with a capacity: each takes a fixed number of tokens, and tokens beyond it are dropped.

transformers calls a kernel as ``f(experts, hidden[T, H], top_k_index[T, k], top_k_weights[T, k]) -> [T, H]``, with
routing weights that the model's own router has normalised. ``experts`` is typed Any, because its attributes are the
family's.

Shape suffixes: T tokens, G groups (one a batch shard), s tokens of a group, k experts a token, N = k*s (token, choice)
pairs of a group, E experts, C capacity (slots of one expert in one group), M = E*C slots of a group, H hidden width.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.models.experts.projections import mlp
from shardwright.models.experts.routing import count
from shardwright.models.layers.side_outputs import real_tokens
from shardwright.models.ops.jax_call import Array, Axes, jax, jax_call, jnp
from shardwright.models.ops.operation import LinearMap, operation

# (tensor, mesh axes of each dimension) -> the tensor laid out by them; in the backward its gradient too
Constrain = Callable[[Tensor, tuple[Axes, ...]], Tensor]


@dataclass(frozen=True)
class Capacity:
    """The experts function that dispatches tokens to slots, under one layout."""

    # an expert's slots over its tokens under balanced routing (GShard's capacity factor); at E/k no token is dropped
    factor: float
    groups: int = 1  # that tokens are dispatched in; with one a batch shard, dispatch needs no communication
    batch_axes: Axes = ()  # they split the groups
    expert_axes: Axes = ()  # they split the experts; tokens cross them by all-to-all
    constrain: Constrain = lambda tensor, axes: tensor  # fixes the layout of an activation and of its gradient

    def slots(self, tokens: int, top_k: int, experts: int) -> int:
        """The number of an expert's slots in a group of ``tokens`` tokens, at most one a token."""
        return min(math.ceil(self.factor * tokens * top_k / experts), tokens)

    def __call__(self, experts: Any, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """Map tokens [T, H] with routing indices and weights [T, k] to [T, H] (GShard's dispatch, arXiv:2006.16668)."""
        # only integers are scattered: for a scatter of activations the partitioner would gather the global batch
        (T, H), k, E, G = x_TH.shape, index_Tk.shape[-1], experts.num_experts, self.groups
        s = T // G
        # evaluation drops nothing, so its loss equals the exported model's elsewhere
        C = self.slots(s, k, E) if experts.training else s
        M = E * C
        x = self.constrain(x_TH.reshape(G, s, H), (self.batch_axes, (), ()))
        real_RS = real_tokens()
        if real_RS is not None:  # padding chooses expert E, which does not exist: it takes no token's slot
            index_Tk = torch.where(real_RS.reshape(T, 1) > 0, index_Tk, torch.full_like(index_Tk, E))
        # choice-major: every token's first choice is seated before any token's second
        index_GN = index_Tk.reshape(G, s, k).transpose(1, 2).reshape(G, k * s)
        weight_GN = weight_Tk.reshape(G, s, k).transpose(1, 2).reshape(G, k * s)
        slot_GN = self.constrain(_slots(index_GN, E, C), (self.batch_axes, ()))
        count(experts, index_Tk, (slot_GN == M).reshape(G, k, s).transpose(1, 2).reshape(T, k))
        owner_GM = self.constrain(_owners(slot_GN, M), (self.batch_axes, ()))

        # each of the two is the other's transpose: a token to its slots, and the sum over a token's slots
        def to_slots(t_GsH: Tensor) -> Tensor:  # an empty slot gets the first token; its routing weight is zero
            return _rows(t_GsH, torch.where(owner_GM < k * s, owner_GM, torch.zeros_like(owner_GM)) % s, False)

        def to_tokens(t_GMH: Tensor) -> Tensor:  # a dropped choice adds zeros
            choices = _rows(t_GMH, slot_GN, True).unflatten(1, (k, -1)).unbind(1)
            return functools.reduce(torch.add, choices)  # a TPU is much slower at `sum` over a dimension of two

        x_GMH = self.constrain(LinearMap.apply(to_slots, to_tokens, x), (self.batch_axes, (), ()))
        x_EGCH = x_GMH.reshape(G, E, C, H).transpose(0, 1)
        group_axes = tuple(axis for axis in self.batch_axes if axis not in self.expert_axes)
        x_EGCH = self.constrain(x_EGCH, (self.expert_axes, group_axes, (), ()))
        # scaled before the second projection, so that the router's gradient needs no second product with its weight
        scale_GM = LinearMap.apply(lambda w: _numbers(w, owner_GM), lambda g: _numbers(g, slot_GN), weight_GN)
        scale_EGC = scale_GM.reshape(G, E, C).transpose(0, 1)
        scale_EGC = self.constrain(scale_EGC, (self.expert_axes, group_axes, ()))
        y_EGCH = mlp(experts, x_EGCH.reshape(E, G * C, H), scale_EGC.reshape(E, G * C, 1)).reshape(E, G, C, H)
        y_EGCH = self.constrain(y_EGCH, (self.expert_axes, group_axes, (), ()))
        y_GMH = self.constrain(y_EGCH.transpose(0, 1).reshape(G, M, H), (self.batch_axes, (), ()))
        y_GsH = self.constrain(LinearMap.apply(to_tokens, to_slots, y_GMH), (self.batch_axes, (), ()))
        return y_GsH.reshape(T, H).to(x_TH.dtype)


def _slots(index_GN: Tensor, E: int, C: int) -> Tensor:
    """The slot in 0..M-1 of each (token, choice), by order of arrival at its expert; M where the expert is full."""
    chosen_GNE = (index_GN.unsqueeze(-1) == torch.arange(E, device=index_GN.device)).to(torch.int32)
    position_GN = ((chosen_GNE.cumsum(1) - 1) * chosen_GNE).sum(-1)
    return torch.where(position_GN < C, index_GN * C + position_GN, torch.full_like(index_GN, E * C))


@operation("owners", lambda slot_GN, M: slot_GN.new_empty((len(slot_GN), M)))
def _owners(slot_GN: Tensor, M: int) -> Tensor:
    """Invert :func:`_slots`: the (token, choice) in 0..N-1 that is in each slot; N where the slot is empty."""
    G, N = slot_GN.shape
    if slot_GN.device.type == "xla":
        return jax_call(_invert, slot_GN, M=M)[0].to(slot_GN.dtype)
    order = torch.arange(N, device=slot_GN.device).unsqueeze(0).expand(G, N)
    empty = torch.full((G, M + 1), N, dtype=slot_GN.dtype, device=slot_GN.device)
    return empty.scatter(1, slot_GN, order)[:, :M].contiguous()


def _invert(slot_GN: Array, M: int) -> Array:
    """:func:`_owners` in JAX, as a batched scatter: for torch's the partitioner gathers the slots of all groups."""
    N = slot_GN.shape[1]
    empty, order = jnp.full(M, N, slot_GN.dtype), jnp.arange(N, dtype=slot_GN.dtype)
    return jax.vmap(lambda slot_N: empty.at[slot_N].set(order, mode="drop"))(slot_GN)


@operation("rows", lambda x_GRH, index_GQ, _: x_GRH.new_empty((*index_GQ.shape, x_GRH.shape[-1])))
def _rows(x_GRH: Tensor, index_GQ: Tensor, checked: bool) -> Tensor:
    """Return the rows ``x[g, index[g, q]]`` of each group g. If ``checked``, index R gives a row of zeros."""
    # a batched gather, which the partitioner keeps within a group: with advanced indexing it would gather the rows of
    # all groups, and `torch.gather` would build an index as large as its output
    if x_GRH.device.type == "xla":
        return jax_call(_take_rows, x_GRH, index_GQ, checked=checked)[0]
    padded = torch.nn.functional.pad(x_GRH, (0, 0, 0, 1))
    return torch.gather(padded, 1, index_GQ.unsqueeze(-1).expand(-1, -1, x_GRH.shape[-1]))


def _take_rows(x_GRH: Array, index_GQ: Array, checked: bool) -> Array:
    # rows out of bounds are written as zeros: to append a row of zeros would copy x
    how: Any = {"mode": "fill", "fill_value": 0} if checked else {"mode": "promise_in_bounds"}
    return jnp.take_along_axis(x_GRH, index_GQ[..., None], axis=1, **how)


def _numbers(number_GR: Tensor, index_GQ: Tensor) -> Tensor:
    return _rows(number_GR.unsqueeze(-1), index_GQ, True).squeeze(-1)
