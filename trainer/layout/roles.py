"""The role of each parameter in its model: the dimensions that may be cut, and why."""

from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from shardwright.layout.plan_checks import collapse

# A weight with only one dimension longer than this is too small to cut: a projection to few gates (_FEW), a
# convolution's kernels or a state of each channel (_THIN).
_FEW, _THIN = 8, 16
# transformers' styles that cut a weight by outputs and by inputs: the first and the second of the last two dimensions
# (distributed/tensor_parallel.py, transformers 5.23). Styles that gather again don't make a pair.
_BY_OUTPUTS = {"colwise", "packed_colwise", "embedding_rowwise"}
_BY_INPUTS = {"rowwise", "packed_rowwise", "embedding_colwise"}
_GATHERED = {"colwise_gather_output", "colwise_rep", "rowwise_split_input", "rowwise_rep"}
_LINEAR = (nn.Linear, Conv1D)


@dataclass(frozen=True)
class Role:
    """The dimensions of a parameter that may be cut.

    Args:
        cut: by tensor parallelism, so that values between a pair of projections stay on their device.
        rest: by other axes, the best first; but what tensor parallelism has cut comes last. Empty: it is replicated.
        experts: the dimension that counts experts.
        vector: a bias, which is too small to be cut twice.
        note: the reason, if it is not obvious.
    """

    cut: int | None = None
    rest: tuple[int, ...] = ()
    experts: int | None = None
    vector: bool = False
    note: str = ""


_WHOLE = Role()


class Roles:
    """The roles of a model's parameters (also on meta), from names, shapes and transformers' own parallel plans.

    ``experts`` are the names of its modules that hold experts, ``count`` how many are in such a module, None without.
    """

    def __init__(self, model: PreTrainedModel, experts: Sequence[str]) -> None:
        self.experts = set(experts)
        self.modules = dict(model.named_modules())
        # semi-private: PreTrainedModel.tp_plan and .ep_plan, transformers/distributed/mixin.py, 5.23
        self.tensor_plan, self.expert_plan = dict(model.tp_plan or {}), dict(model.ep_plan or {})
        self.tokens = (model.get_input_embeddings(), model.get_output_embeddings())
        self.width = next(model.get_input_embeddings().parameters()).shape[-1]
        self.count = next((len(p) for name in experts for p in self.modules[name].parameters()), None)
        self.routers = self._routers()

    def of(self, name: str, parameter: torch.Tensor) -> Role:
        """The role of the parameter ``name``."""
        module_name, _, leaf = name.rpartition(".")
        module, shape = self.modules[module_name], tuple(parameter.shape)
        if module_name in self.experts or self.expert_plan.get(collapse(name)) == "grouped_gemm":
            return self._of_experts(name, shape)
        if any(f"{name}.".startswith(f"{router}.") for router in self.routers):
            if len(shape) > 1 and shape[0] > _THIN:
                return Role(rest=(1,), note="the router")
            return Role(note="the router: small, and every token needs all of it" if len(shape) > 1 else "")
        linear = isinstance(module, _LINEAR)
        if len(shape) < 2:
            if linear and leaf == "bias":
                weight = self.of(f"{module_name}.weight", module.get_parameter("weight"))
                if weight.cut == _output_dim(module):  # the second of a pair adds its bias once, to the sum
                    return Role(cut=0, rest=(0,), vector=True)
            return _WHOLE
        style = self._style(name)
        if sorted(shape)[-2] <= (_FEW if linear else _THIN) and style is None:
            return _WHOLE
        if module in self.tokens or isinstance(module, nn.Embedding):
            return Role(cut=0, rest=(0, 1))
        cut = self._cut(module_name) if linear and style is None else _literal(style, len(shape))
        # a pair's weights are gathered along the dimension between the two; others along the largest
        rest = sorted(range(len(shape)), key=lambda dim: (linear and dim != cut, -shape[dim]))
        return Role(cut=cut, rest=tuple(rest))

    def _of_experts(self, name: str, shape: tuple[int, ...]) -> Role:
        """The role of a weight or bias ``[experts, …]`` of all experts."""
        module_name, _, leaf = name.rpartition(".")
        last = len(shape) - 1
        closes = leaf.startswith("down")  # the second of a pair; names of the interface, integrations/moe.py, 5.23
        if shape[0] != self.count:
            return _WHOLE
        if last < 2:
            return Role(cut=last if last and not closes else None, experts=0, vector=True)
        cut = _literal(self._style(name), len(shape))
        if cut is None:
            inputs = last - 1 if getattr(self.modules[module_name], "is_transposed", False) else last
            cut = inputs if closes else 2 * last - 1 - inputs
        return Role(cut=cut, rest=tuple(range(last, 0, -1)), experts=0)

    def _routers(self) -> set[str]:
        """Names of the routers: modules or parameters beside experts with one output for each."""
        found = set()
        for parent in {name.rpartition(".")[0] for name in self.experts}:
            lengths = defaultdict(set)
            for name, parameter in self.modules[parent].named_parameters(remove_duplicate=False):
                if parameter.dim() > 1:
                    lengths[f"{parent}.{name.partition('.')[0]}"].add(len(parameter))
            # one that writes the model's width is a shared expert, or the attention
            found |= {name for name, each in lengths.items() if self.count in each and self.width not in each}
        return found - self.experts

    def _style(self, name: str) -> str | None:
        """The plan's style for a parameter, or for the module whose weight or bias it is."""
        kind = collapse(name)
        style = self.tensor_plan.get(kind, self.tensor_plan.get(kind.rpartition(".")[0]))
        return None if style in _GATHERED else style

    def _cut(self, name: str) -> int | None:
        """The dimension of a linear module's weight that a pair cuts; None: it belongs to no pair."""
        module, width = self.modules[name], self._width_at(name)
        by_outputs, by_inputs = _output_dim(module), 1 - _output_dim(module)
        beside = [m for m in self.modules[name.rpartition(".")[0]].children() if isinstance(m, _LINEAR)]
        read, written = _ends(module)
        if read == written == width:  # a square attention: its last projection writes
            square = [m for m in beside if _ends(m) == (width, width)]
            return by_inputs if module is square[-1] and (len(square) > 1 or module is beside[-1]) else by_outputs
        if read == width:
            # latent attention's first projections begin no pair: another widens their output at once, or most of it,
            # where it has the keys' rotary part too
            inner = [_ends(m) for m in beside if width not in _ends(m)]
            low_rank = any(narrow <= written < 2 * narrow and narrow < wide for narrow, wide in inner)
            return None if low_rank else by_outputs
        return by_inputs if written == width or written <= read else by_outputs

    def _width_at(self, name: str) -> int:
        """The width of the residual stream around the module ``name``: a vision tower has its own."""
        while name:
            # a value for each layer raises (transformers/integrations/heterogeneity/configuration_utils.py, 5.23)
            with suppress(RuntimeError):
                width = getattr(getattr(self.modules[name], "config", None), "hidden_size", None)
                if isinstance(width, int):
                    return width
            name = name.rpartition(".")[0]
        return self.width


def _ends(linear: nn.Module) -> tuple[int, int]:
    """(input width, output width) of a linear module."""
    shape = linear.get_parameter("weight").shape
    return shape[1 - _output_dim(linear)], shape[_output_dim(linear)]


def _output_dim(module: nn.Module) -> int:
    """The output dimension of a linear module's weight; transformers' `Conv1D` has ``[in, out]``."""
    return 1 if isinstance(module, Conv1D) else 0


def _literal(style: str | None, rank: int) -> int | None:
    """The dimension, of ``rank``, that the plan's ``style`` cuts, if any."""
    return rank - 2 if style in _BY_OUTPUTS else rank - 1 if style in _BY_INPUTS else None
