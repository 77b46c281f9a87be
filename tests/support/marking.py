"""Makes our own step mark its tensors in place, as torch_xla's `MarkShardingFunction` did in pytorch/xla#8809.

Semi-private, torch 2.9: torch/_subclasses/fake_tensor.py and functional_tensor.py; torch._sync,
torch._functionalize_replace and torch._from_functional_tensor (torch/csrc/autograd/python_torch_functions_manual.cpp).
Semi-private, torch_xla 2.9: _XLAC._xla_mark_sharding (torch_xla/csrc/init_python_bindings.cpp).
"""

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

from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.step.loss import Tensors
from shardwright.step.train_step import TrainStep
from shardwright.xla import sharding
from shardwright.xla.device_mesh import AbstractMesh

BASE = ", base"


class InPlace(torch.autograd.Function):
    """Marks its input in place, and in the backward the gradient."""

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
    """Returns its input, as marking in place does, and marks nothing: a placeholder has its layout already."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@contextmanager
def in_place(*, parameters: bool) -> Iterator[None]:
    """Inside this context a lowered `TrainStep` marks activations, gradients and the parameters' uses in place.

    Args:
        parameters: mark the stored parameters too. If a function returns its input, torch makes the result a *view*,
            and a lazy tensor's view has a value apart from its base's. `TrainStep.state` then holds the bases too,
            under names that end in ``BASE``, since any ``torch_xla.sync()`` computes all that is alive.
    """
    ours, trace, state = sharding._constrain, TrainStep.trace, TrainStep.state.fget
    bases: Tensors = {}

    def marked(tensor: torch.Tensor, key: str) -> torch.Tensor:
        # AOTAutograd (a layer with remat, or scanned) traces with tensors that can't be marked: there, out of place
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
    """(a parameter as marking in place leaves it, its base), in a step that is not the first.

    The first step has left the base and the view in a buffer each. The forward reads the base, through autograd's
    leaves, which are new views of it; the optimizer reads the parameter itself.
    """
    mesh = step.mesh
    assert isinstance(mesh, AbstractMesh)
    own = next(placeholder.tensor for placeholder in mesh.placed if placeholder.name == name).clone()
    parameter = nn.Parameter(_SameTensor.apply(placed))
    with torch.no_grad():
        parameter.copy_(mesh.place(name + BASE, placed.shape, placed.dtype, step.specs[name]))
    torch._functionalize_replace(parameter, torch._from_functional_tensor(own))  # type: ignore[attr-defined]
    return parameter, placed


def donating_no_base(lowered: LoweredGraph) -> LoweredGraph:
    """``lowered``, with a base's buffer not donated: torch_xla donates only the buffer that the optimizer reads."""
    arguments = (replace(a, output=None) if a.name.endswith(BASE) else a for a in lowered.arguments)
    return replace(lowered, arguments=tuple(arguments))
