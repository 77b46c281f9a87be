"""Muon: a matrix is updated by its orthogonalised momentum (https://kellerjordan.github.io/posts/muon/).

It equals `torch.optim.Muon` of torch 2.9 step by step, with its coefficients and compute dtype; experts' matrices are
orthogonalised each by itself. In a stack of layers each device gets some layers' matrices whole, by an exchange before
the iteration and one after it, and goes through them one at a time: nothing crosses devices in the iteration. A matrix
outside stacks is never gathered: its iteration runs on shards of the longer dimension, and every device holds whole
only the Gram matrix of the shorter one, in each turn.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from shardwright.optimizers.adamw import AdamW
from shardwright.optimizers.optimizer import BELOW_ONE, OnMesh, Optimizer, State, Tensor, Update, number

# the coefficients of Newton and Schulz's quintic iteration, and the least norm: torch/optim/_muon.py, torch 2.9
_COEFFICIENTS, _EPSILON = (3.4445, -4.7750, 2.0315), 1e-7


@dataclass(frozen=True)
class Matrices(OnMesh):
    """The layout of the iteration's tensors on the mesh: [rows, columns], or [experts, rows, columns], of one layer."""

    def stored(self, matrix: Tensor) -> Tensor:
        return self.constrain(matrix, self.spec)

    def split(self, matrix: Tensor, dim: int) -> Tensor:
        """Split along ``dim`` (-1 or -2) alone, by all axes that split the parameter's matrices and divide it."""
        axes: list[str] = []
        for axis in self.axes:
            if matrix.shape[dim] % math.prod(self.mesh[a] for a in (*axes, axis)) == 0:
                axes.append(axis)
        last = ((), self.in_order(axes)) if dim == -1 else (self.in_order(axes), ())
        return self.constrain(matrix, (*self.spec[:-2], *last))

    def whole(self, matrix: Tensor) -> Tensor:
        """Each matrix on every device that has a part of it."""
        return self.constrain(matrix, (*self.spec[:-2], (), ()))

    @property
    def axes(self) -> tuple[str, ...]:
        return tuple(axis for entry in self.spec[-2:] for axis in entry)

    def in_order(self, axes: Collection[str]) -> tuple[str, ...]:
        return tuple(axis for axis in self.mesh if axis in axes)


@dataclass(frozen=True)
class Muon(Optimizer):
    """The module's optimizer."""

    title = "Muon"
    about = "matrices of layers move by their orthogonalised momentum, the rest by AdamW"
    kept = ("momentum",)
    rest = AdamW

    momentum: float = number(0.95, "its decay, in Nesterov's form", least=0, below=BELOW_ONE)
    # five are usual, and each is compiled
    ns_steps: int = number(5, "turns of Newton and Schulz's iteration", least=1, below=21)
    # unlike torch.optim.Muon's default, since one learning rate is for Muon's part and for AdamW's
    adjust_lr_fn: str = number(
        "match_rms_adamw",
        "how the rate follows a matrix' shape, in torch's words: 0.2 √max(rows, columns) of arXiv:2502.16982, or "
        "original, Keller Jordan's √max(1, rows/columns), for a learning rate of Muon's own",
        words=("match_rms_adamw", "original"),
    )

    @classmethod
    def takes(cls, name: str, shape: Sequence[int]) -> bool:
        """Whether it is a matrix of a layer, or one for each expert.

        The rest are embeddings, head, norms, biases, and convolution kernels, which are [channels, 1, width].
        """
        in_a_layer = any(part == "*" or part[:1].isdigit() for part in name.split("."))
        return in_a_layer and len(shape) > 1 and min(shape[-2:]) > 1 and "bias" not in name

    def update(self, of: Update) -> tuple[Tensor, State]:
        """The iteration computes in bfloat16."""
        (momentum,), gradient = of.state, of.gradient
        momentum = momentum + (1 - self.momentum) * (gradient - momentum)
        update = self._orthogonalised((momentum - (1 - self.momentum) * (momentum - gradient)).bfloat16(), of.layout)
        rows, columns = gradient.shape[-2:]
        matched = self.adjust_lr_fn == "match_rms_adamw"
        scale = 0.2 * math.sqrt(max(rows, columns)) if matched else math.sqrt(max(1.0, rows / columns))
        return of.decayed(of.learning_rate) - (scale * of.learning_rate) * update.float(), (momentum,)

    def _orthogonalised(self, update: Tensor, layout: OnMesh) -> Tensor:
        import torch
        from torch.nn.functional import pad

        from shardwright.models.ops.while_loop import run_turns

        apart = Matrices(layout.mesh, layout.spec[int(layout.stacked) :], False, layout.constrain)
        if not layout.stacked:
            return orthogonalised(update, self.ns_steps, apart)
        shards, layers = math.prod(layout.mesh[axis] for axis in apart.axes), len(update)
        # of [layers, …]: the axes of a matrix split the layers, whose matrices are whole
        apart = replace(apart, spec=(apart.in_order(apart.axes), *apart.spec[:-2], (), ()))
        # layers of zeros, which stay zeros, make the exchange even
        update = apart.stored(pad(update, [0, 0] * (update.dim() - 1) + [0, -layers % shards]))
        turns = update.reshape(shards, -1, *update.shape[1:]).transpose(0, 1)

        def turn(carry: Tensor, some: Tensor) -> tuple[Tensor, Tensor]:
            return carry, orthogonalised(some, self.ns_steps, apart)

        made = run_turns(turn, torch.zeros((), device=update.device), turns)[1]
        whole = apart.stored(made.transpose(0, 1).reshape(update.shape))[:layers]
        return layout.constrain(whole, layout.spec)


def orthogonalised(matrix: Tensor, steps: int, layout: Matrices) -> Tensor:
    """U Vᵀ of ``matrix`` = U S Vᵀ, nearly: its singular values become about 1. [..., rows, columns], laid out alike."""
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[-2] > matrix.shape[-1]
    wide = layout.split(matrix.mT if tall else matrix, -1)
    norm = wide.float().pow(2).sum((-2, -1), keepdim=True).sqrt().to(wide.dtype)
    wide = wide / norm.clamp(min=_EPSILON)
    for _ in range(steps):
        rows = layout.split(_product(wide, wide.mT).to(wide.dtype), -2)
        whole = layout.whole((b * rows.float() + c * _product(rows, layout.whole(rows))).to(wide.dtype))
        wide = layout.split((a * wide.float() + _product(whole, wide)).to(wide.dtype), -1)
    return layout.stored(wide.mT if tall else wide)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """The matrix product, in float32: torch's ``addmm`` rounds a product and its addend once, together.

    For bfloat16 values it costs a TPU no more: its products add up in float32 whatever they return.
    """
    return left.float() @ right.float()
