"""Muon: the momentum of a matrix, orthogonalised, is its update (https://kellerjordan.github.io/posts/muon/).

It equals `torch.optim.Muon` of torch 2.9 step by step, whose coefficients and compute dtype it has; the matrices of
experts are orthogonalised each by itself. Of a stack of layers each device is given some layers' matrices whole, by an
exchange before the iteration and one after it, and goes through them one at a time: nothing crosses devices in the
iteration. A matrix that is in no stack is never gathered: its iteration runs on shards of the longer dimension, and
what every device holds whole is the Gram matrix of the shorter one, in each turn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch.nn.functional import pad

from shardwright.layout.partition import PartitionSpec, axes_of
from shardwright.models.ops.while_loop import run_turns
from shardwright.step.optimizers.rule import State, decayed
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh

# of Newton and Schulz's quintic iteration, and the least norm: those of torch/optim/_muon.py, torch 2.9
_COEFFICIENTS, _EPSILON = (3.4445, -4.7750, 2.0315), 1e-7


@dataclass(frozen=True)
class Matrices:
    """How the iteration's tensors lie on the mesh: [rows, columns], or [experts, rows, columns].

    Args:
        spec: of the parameter, of one layer.
    """

    mesh: DeviceMesh
    spec: PartitionSpec

    def stored(self, matrix: torch.Tensor) -> torch.Tensor:
        """As the parameter is."""
        return sharding.constrain(matrix, self.mesh, self.spec)

    def split(self, matrix: torch.Tensor, dim: int) -> torch.Tensor:
        """Split along ``dim`` (-1 or -2) alone, by all axes that split the parameter's matrices and divide it."""
        axes: list[str] = []
        for axis in self.axes:
            if matrix.shape[dim] % math.prod(self.mesh.shape()[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
        last = (None, self._entry(axes)) if dim == -1 else (self._entry(axes), None)
        return sharding.constrain(matrix, self.mesh, (*self.spec[:-2], *last))

    def whole(self, matrix: torch.Tensor) -> torch.Tensor:
        """Each matrix on every device that has a part of it."""
        return sharding.constrain(matrix, self.mesh, (*self.spec[:-2], None, None))

    @property
    def axes(self) -> tuple[str, ...]:
        """Those that split a matrix."""
        return tuple(axis for entry in self.spec[-2:] for axis in axes_of(entry))

    def by_layers(self) -> Matrices:
        """Of several layers, [layers, …]: what splits a matrix splits the layers, whose matrices are whole."""
        return replace(self, spec=(self._entry(self.axes), *self.spec[:-2], None, None))

    def _entry(self, axes: Sequence[str]) -> str | tuple[str, ...] | None:
        ordered = tuple(axis for axis in self.mesh.shape() if axis in axes)
        return ordered if len(ordered) > 1 else ordered[0] if ordered else None


@dataclass(frozen=True)
class Muon:
    """See the module, and `shardwright.step.update_rules` for what a rule is.

    Args:
        momentum: its decay; Nesterov's form, as in the reference.
        ns_steps: turns of the iteration.
        adjust_lr_fn: how the learning rate follows a matrix' shape, in torch's names: ``original`` (Keller Jordan's
            √max(1, rows/columns)) or ``match_rms_adamw`` (0.2 √max(rows, columns), arXiv:2502.16982).
        stacked: whether dimension 0 is layers.
        dtype: what the iteration computes in.
    """

    momentum: float
    ns_steps: int
    adjust_lr_fn: str
    matrices: Matrices
    stacked: bool
    dtype: torch.dtype = torch.bfloat16

    def __call__(
        self,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
        weight_decay: float,
    ) -> tuple[torch.Tensor, State]:
        (momentum,) = state
        momentum = momentum + (1 - self.momentum) * (gradient - momentum)
        update = self._orthogonalised((momentum - (1 - self.momentum) * (momentum - gradient)).to(self.dtype))
        rows, columns = parameter.shape[-2:]
        matched = self.adjust_lr_fn == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1.0, rows / columns))
        parameter = decayed(parameter, learning_rate, weight_decay)
        return parameter - (scale * learning_rate) * update.to(torch.float32), (momentum,)

    def _orthogonalised(self, update: torch.Tensor) -> torch.Tensor:
        if not self.stacked:
            return orthogonalised(update, self.ns_steps, self.matrices)
        apart, layers = self.matrices.by_layers(), len(update)
        shards = math.prod(self.matrices.mesh.shape()[axis] for axis in self.matrices.axes)
        # layers of zeros, which stay zeros, make the exchange even
        update = apart.stored(pad(update, [0, 0] * (update.dim() - 1) + [0, -layers % shards]))
        turns = update.reshape(shards, -1, *update.shape[1:]).transpose(0, 1)

        def turn(carry: torch.Tensor, some: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return carry, orthogonalised(some, self.ns_steps, apart)

        made = run_turns(turn, torch.zeros((), device=update.device), turns)[1]
        whole = apart.stored(made.transpose(0, 1).reshape(update.shape))[:layers]
        return sharding.constrain(whole, self.matrices.mesh, (None, *self.matrices.spec))


def orthogonalised(matrix: torch.Tensor, steps: int, layout: Matrices) -> torch.Tensor:
    """U Vᵀ of ``matrix`` = U S Vᵀ, nearly: its singular values come to lie about 1. [..., rows, columns], as given."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = layout.split(matrix.mT if tall else matrix, -1)
    norm = torch.sqrt(wide.float().pow(2).sum((-2, -1), keepdim=True)).to(wide.dtype)
    wide = wide / norm.clamp(min=_EPSILON)
    for _ in range(steps):
        rows = layout.split(_product(wide, wide.mT).to(wide.dtype), -2)
        whole = layout.whole((b * rows.float() + c * _product(rows, layout.whole(rows))).to(wide.dtype))
        wide = layout.split((a * wide.float() + _product(whole, wide)).to(wide.dtype), -1)
    return layout.stored(wide.mT if tall else wide)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The matrix product, in float32: torch's ``addmm`` rounds a product and what is added to it once, together.

    Of values in bfloat16 it costs a TPU no more, whose products add up in float32 whatever they return.
    """
    return left.float() @ right.float()
