"""A function of tensors, traced once by AOTAutograd into a forward and a backward graph."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from functorch.compile import aot_function, make_boxed_func
from torch import Tensor

# semi-private: torch/_logging/_internal.py and torch/fx/_lazy_graph_module.py, torch 2.9
from torch._logging._internal import log_state
from torch.fx._lazy_graph_module import _use_lazy_graph_module

from shardwright.models.layers.remat import VALUES, Value
from shardwright.models.ops import scopes

Flat = list[Tensor]


class LayerGraph:
    """The graphs of ``function`` of tensors to tensors; its backward gives gradients to ``inputs`` that require one."""

    def __init__(
        self, function: Callable[[Flat], Flat], inputs: Sequence[Tensor], partition: Callable[..., Any]
    ) -> None:
        learns = torch.is_grad_enabled()  # else there is no backward to trace
        like = [torch.empty_like(t, requires_grad=learns and t.requires_grad) for t in inputs]
        found: dict[str, torch.fx.GraphModule] = {}

        def keep(name: str, module: torch.fx.GraphModule, _: Any) -> Any:
            scopes.insert_scopes(module)
            found[name] = module
            return make_boxed_func(module)

        def without_aliases(*given: Tensor) -> Flat:
            # AOTAutograd leaves an output that is an input out of the graph
            seen = {id(t) for t in given}
            return [t.clone() if id(t) in seen else t for t in function(list(given))]

        forward, backward = functools.partial(keep, "forward"), functools.partial(keep, "backward")
        # else each graph is printed for nobody, and each that is on the way to the last two made into code
        logged = bool(log_state.artifact_names or log_state.log_qname_to_level or "TORCH_TRACE" in os.environ)
        traced = aot_function(without_aliases, forward, backward, partition, enable_log=logged)
        with torch.enable_grad(), _use_lazy_graph_module(True):
            outputs = traced(*like)
            self.differentiable = [t.requires_grad for t in outputs]  # not integers, nor outputs of no such input
            ends = [t for t in outputs if t.requires_grad]
            torch.autograd.backward(ends, [torch.ones_like(t) for t in ends])
        self._forward, self._outputs = found["forward"], len(outputs)
        # none where nothing learns, as in layers before the first with factors
        self._backward = found.get("backward")
        # that the forward could keep, if the remat policy chooses among them
        self.values: tuple[Value, ...] = self._forward.meta.get(VALUES, ())
        with torch.no_grad():
            saved = self.forward(like)[1]
        self.saved = len(saved)  # the tensors that the forward keeps for the backward
        # position among the saved tensors → position of the input that it is, unchanged
        where = {id(t): index for index, t in enumerate(like)}
        self.aliases = {index: where[id(t)] for index, t in enumerate(saved) if id(t) in where}

    def forward(self, inputs: Sequence[Tensor]) -> tuple[Flat, Flat]:
        """Return the outputs, and the tensors that the backward needs."""
        results = self._forward(*inputs)
        return list(results[: self._outputs]), list(results[self._outputs :])

    def backward(self, saved: Sequence[Tensor], gradients: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return the gradient of each input, or None, from those of the differentiable outputs."""
        assert self._backward is not None
        return self._backward(*saved, *gradients)
