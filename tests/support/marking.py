"""Marking in place, as torch_xla's `MarkShardingFunction` did when pytorch/xla#8809 was written, in our own step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from trainer.compile.lowering import Lowered
from trainer.step.loss import Tensors
from trainer.step.train_step import TrainStep
from trainer.xla import sharding
from trainer.xla.mesh import AbstractMesh

BASE = ", base"


class InPlace(torch.autograd.Function):
    """Marks its input itself, and in the backward the gradient itself."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, key: str) -> torch.Tensor:
        ctx.key = key
        torch_xla._XLAC._xla_mark_sharding(tensor, sharding.op_sharding(key))
        return tensor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        torch_xla._XLAC._xla_mark_sharding(gradient, sharding.op_sharding(ctx.key))
        return gradient, None


class _SameTensor(torch.autograd.Function):
    """Returns its input, as marking in place does; for a placeholder, which has its layout and can't be marked."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@contextmanager
def in_place(*, parameters: bool) -> Iterator[None]:
    """While it lasts, a lowered `TrainStep` marks activations, gradients and the parameters' uses in place.

    Args:
        parameters: the stored parameters too. What a function returns of its inputs, torch makes a *view*, and a lazy
            tensor's view has a value of its own, apart from its base's. `TrainStep.state` then holds the bases too, as
            names that end in ``BASE``: any ``torch_xla.sync()`` computes what is alive.
    """
    ours, trace, state = sharding._constrain, TrainStep.trace, TrainStep.state.fget
    bases: Tensors = {}

    def marked(tensor: torch.Tensor, key: str) -> torch.Tensor:
        # What AOTAutograd traces (a layer with remat, or scanned) has no XLA tensor to mark: it stays out of place.
        traced = isinstance(tensor, FakeTensor | FunctionalTensor)
        return ours(tensor, key) if traced else InPlace.apply(tensor, key)

    def trace_marked(self: TrainStep, *args: Any, **options: Any) -> Tensors:
        for name, placed in self.parameters.items():
            self.parameters[name], bases[name + BASE] = _after_a_step(name, placed.detach(), self)
        return trace(self, *args, **options)

    def state_and_bases(self: TrainStep) -> Tensors:
        for base in bases.values():
            torch._sync(base)
        return {**state(self), **bases}  # type: ignore[misc]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharding, "_constrain", marked)
        if parameters:
            patch.setattr(TrainStep, "trace", trace_marked)
            patch.setattr(TrainStep, "state", property(state_and_bases))
        yield


def _after_a_step(name: str, placed: torch.Tensor, step: TrainStep) -> tuple[nn.Parameter, torch.Tensor]:
    """(the parameter as marking in place leaves it, its base), of a step to be lowered, when one has run before it.

    That has left base and view in a buffer each. The forward reads the base, through autograd's leaves, which are new
    views of it; the optimizer reads the parameter itself.
    """
    mesh = step.mesh
    assert isinstance(mesh, AbstractMesh)
    own = next(placeholder.tensor for placeholder in mesh.placed if placeholder.name == name).clone()
    parameter = nn.Parameter(_SameTensor.apply(placed))
    with torch.no_grad():
        parameter.copy_(mesh.place(name + BASE, placed.shape, placed.dtype, step.specs[name]))
    torch._functionalize_replace(parameter, torch._from_functional_tensor(own))  # type: ignore[attr-defined]
    return parameter, placed


def donating_no_base(lowered: Lowered) -> Lowered:
    """As torch_xla donates: the buffer that the optimizer reads becomes its new value, the base's does not."""
    arguments = (replace(a, output=None) if a.name.endswith(BASE) else a for a in lowered.arguments)
    return replace(lowered, arguments=tuple(arguments))
