"""What each parameter of a model is to the layers around it: which of its dimensions may be cut, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from trainer.layout.checks import collapse

_THIN = 16  # a matrix with a dimension of at most that is too small to cut: a kernel's width, a state, a gate
# What transformers calls its ways to cut a weight by its outputs and by its inputs; of the weight's last two dimensions
# the first and the second (distributed/tensor_parallel.py, transformers 5.23).
_BY_OUTPUTS = {"colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise"}
_BY_INPUTS = {"rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise", "embedding_colwise"}
_LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Role:
    """Which dimensions of a parameter may be cut.

    Args:
        cut: the one that tensor parallelism cuts, so that what lies between a pair stays on its device; None: none.
        rest: those that other axes may cut, the best first; none: it is replicated.
        experts: the one that counts experts; None: none does.
        vector: a bias, which is too small to be cut twice.
        note: why, where it does not go without saying.
    """

    cut: int | None = None
    rest: tuple[int, ...] = ()
    experts: int | None = None
    vector: bool = False
    note: str = ""

    def order(self, cut: bool) -> tuple[int, ...]:
        """The dimensions for the other axes, the best first; ``cut``: tensor parallelism has taken its own.

        Weights are gathered along them before use. Where there are pairs one of the two dimensions is free; where
        there are none, both weights of a pair are cut along what lies between them.
        """
        if self.cut not in self.rest:
            return self.rest
        others = tuple(dim for dim in self.rest if dim != self.cut)
        return (*others, self.cut) if cut or self.experts is not None else (self.cut, *others)


_WHOLE = Role()
_ROUTER = Role(note="the router: small, and every token needs all of it")


class Roles:
    """The roles of a model's parameters. Reads names, shapes and transformers' own parallel plans.

    Args:
        model: also one on meta.
        experts: names of its modules that hold experts.

    Attributes:
        count: how many experts such a module holds; None without any.
    """

    def __init__(self, model: PreTrainedModel, experts: Sequence[str]) -> None:
        self.experts = set(experts)
        self.modules = dict(model.named_modules())
        # semi-private: PreTrainedModel.tp_plan and .ep_plan, transformers/distributed/mixin.py, 5.23
        self.tensor_plan, self.expert_plan = dict(model.tp_plan or {}), dict(model.ep_plan or {})
        self.tokens = (model.get_input_embeddings(), model.get_output_embeddings())
        self.width = model.get_input_embeddings().weight.shape[-1]
        self.count = next((len(p) for name in experts for p in self.modules[name].parameters()), None)
        self.routers = self._routers()

    def of(self, name: str, parameter: torch.Tensor) -> Role:
        """The role of the parameter ``name``."""
        module_name, _, leaf = name.rpartition(".")
        module, shape = self.modules[module_name], tuple(parameter.shape)
        if module_name in self.experts or self.expert_plan.get(collapse(name)) == "grouped_gemm":
            return self._of_experts(name, shape)
        if any(f"{name}.".startswith(f"{router}.") for router in self.routers):
            return _ROUTER if len(shape) > 1 else _WHOLE
        style = self._style(name)
        linear = isinstance(module, _LINEAR)
        if len(shape) < 2:
            first = linear and leaf == "bias" and self._cut(module_name, style) == _output_dim(module)
            return Role(cut=0, rest=(0,), vector=True) if first else _WHOLE
        if min(shape) <= _THIN and style is None:
            return _WHOLE
        if module in self.tokens or isinstance(module, nn.Embedding):
            return Role(cut=0, rest=(0, 1))
        if linear:
            cut = self._cut(module_name, style)
            return Role(cut=cut, rest=_dims_from(cut or 0, 2), note="" if cut is not None else "no pair cuts it")
        widest_first = sorted(range(len(shape)), key=lambda dim: -shape[dim])
        return Role(cut=_literal(style, len(shape)), rest=tuple(widest_first))

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> Role:
        """The role of a parameter ``[experts, …]``, which is a weight or a bias of all experts."""
        module_name, _, leaf = name.rpartition(".")
        last = len(shape) - 1
        closes = leaf.startswith("down")  # the second of a pair; names of the interface, integrations/moe.py, 5.23
        if last < 2:
            return Role(cut=last if last and not closes else None, experts=0, vector=True)
        cut = _literal(self._style(name), len(shape))
        if cut is None:
            inputs = last - 1 if getattr(self.modules[module_name], "is_transposed", False) else last
            cut = inputs if closes else 2 * last - 1 - inputs
        return Role(cut=cut, rest=tuple(range(last, 0, -1)), experts=0)

    def _routers(self) -> set[str]:
        """Names of what stands beside experts and chooses among them: it has an output for each of them."""
        parents = {name.rpartition(".")[0] for name in self.experts}
        found = set()
        for parent in parents:
            beside = [(name, m.parameters()) for name, m in self.modules[parent].named_children()]
            beside += [(name, iter([p])) for name, p in self.modules[parent].named_parameters(recurse=False)]
            for name, parameters in beside:
                sizes = {len(p) for p in parameters if p.dim() > 1}
                # what writes the model's width is an expert that all tokens share, or the attention
                if self.count in sizes and self.width not in sizes and f"{parent}.{name}" not in self.experts:
                    found.add(f"{parent}.{name}")
        return found

    def _style(self, name: str) -> str | None:
        """What the model's plan says of a parameter, or of the module whose weight or bias it is."""
        kind = collapse(name)
        return self.tensor_plan.get(kind, self.tensor_plan.get(kind.rpartition(".")[0]))

    def _cut(self, name: str, style: str | None) -> int | None:
        """The dimension of a linear module's weight that a pair cuts; None: it is the second of no pair, nor the first.

        Where the plan is silent, the first of a pair reads the model's width and the second writes it.
        """
        module = self.modules[name]
        if style is not None:
            return _literal(style, 2)
        out, into = _output_dim(module), 1 - _output_dim(module)
        writes, reads = (module.weight.shape[dim] == self._width_at(name) for dim in (out, into))
        beside = [m for m in self.modules[name.rpartition(".")[0]].children() if isinstance(m, _LINEAR)]
        if reads and writes:  # projections of a square attention: the last one writes
            last = [m for m in beside if m.weight.shape == module.weight.shape][-1]
            return into if module is last else out
        if reads:
            return None if self._is_low_rank(module, beside) else out
        if writes:
            return into
        return out if module.weight.shape[out] > module.weight.shape[into] else into

    def _is_low_rank(self, module: nn.Module, beside: Sequence[nn.Module]) -> bool:
        """Whether what ``module`` writes is widened again at once, as latent attention does: it closes no pair."""
        written = module.weight.shape[_output_dim(module)]
        for other in beside:
            wide, narrow = (other.weight.shape[dim] for dim in (_output_dim(other), 1 - _output_dim(other)))
            # it may write some numbers besides, such as the keys' rotary part
            if other is not module and narrow < wide and narrow <= written < 2 * narrow:
                return True
        return False

    def _width_at(self, name: str) -> int:
        """The width of the residual stream where the module ``name`` stands: a vision tower has its own."""
        while name:
            config = getattr(self.modules[name], "config", None)
            try:
                if isinstance(width := getattr(config, "hidden_size", None), int):
                    return width
            except RuntimeError:  # a value for each layer; integrations/heterogeneity/configuration_utils.py, 5.23
                pass
            name = name.rpartition(".")[0]
        return self.width


def _output_dim(module: nn.Module) -> int:
    """The dimension of a linear module's weight that counts its outputs: transformers' `Conv1D` has ``[in, out]``."""
    return 1 if isinstance(module, Conv1D) else 0


def _literal(style: str | None, rank: int) -> int | None:
    """The dimension of a weight of ``rank`` dimensions that the plan's ``style`` cuts; None: none."""
    return rank - 2 if style in _BY_OUTPUTS else rank - 1 if style in _BY_INPUTS else None


def _dims_from(first: int, rank: int) -> tuple[int, ...]:
    """All dimensions, ``first`` at the front."""
    return (first, *(dim for dim in range(rank) if dim != first))
