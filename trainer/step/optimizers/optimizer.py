"""The optimizer of a step: each parameter's rule and state; which parameters decay; clipping by the global norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

from shardwright.arguments.training import TrainingArguments
from shardwright.layout.optimizer_state import StateTensor, rule_of
from shardwright.layout.partition import PartitionSpec, partition_spec
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.stacking import is_stacked
from shardwright.step.optimizers.adafactor import Adafactor
from shardwright.step.optimizers.adamw import AdamW
from shardwright.step.optimizers.lion import Lion
from shardwright.step.optimizers.muon import Matrices, Muon
from shardwright.step.optimizers.rule import State, UpdateRule
from shardwright.xla.device_mesh import DeviceMesh

# The names that transformers' own Trainer keeps weight decay away from (`Trainer.get_decay_parameter_names`, 5.23).
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class Optimizer:
    """What updates the parameters.

    Args:
        rules: name → how the parameter is updated.
        state: name → what is kept of the parameter, in the order in which its rule takes it.
        specs: the same as partition specs.
        decay: names of the parameters that weight decay applies to.
    """

    rules: Mapping[str, UpdateRule]
    state: Mapping[str, tuple[StateTensor, ...]]
    specs: Mapping[str, tuple[PartitionSpec, ...]]
    weight_decay: float
    decay: frozenset[str]

    def update(
        self,
        name: str,
        parameter: torch.Tensor,
        gradient: torch.Tensor,
        state: State,
        learning_rate: torch.Tensor,
        step: torch.Tensor,
    ) -> tuple[torch.Tensor, State]:
        """The new parameter and its new state after update number ``step`` (from 1), in float32.

        It computes in float32 whatever ``parameter`` and ``state`` are stored in.
        """
        parameter, state = parameter.to(torch.float32), tuple(tensor.to(torch.float32) for tensor in state)
        weight_decay = self.weight_decay if name in self.decay else 0.0
        return self.rules[name](parameter, gradient, state, learning_rate, step, weight_decay)


def make_optimizer(args: TrainingArguments, plan: ShardingPlan, mesh: DeviceMesh, model: nn.Module) -> Optimizer:
    """The optimizer that ``args`` ask for, of the parameters that ``plan`` trains: those of ``model``, as stored."""
    axes, entries = tuple(plan.mesh), [entry for entry in plan.parameters if entry.trained]
    state = {entry.name: plan.state_of(entry.name) for entry in entries}
    specs = {
        name: tuple(partition_spec(kept.layout, len(kept.shape), axes) for kept in both) for name, both in state.items()
    }
    rules = {entry.name: _rule(args, entry, plan, mesh) for entry in entries}
    return Optimizer(rules, state, specs, args.weight_decay, decay_names(model))


def _rule(args: TrainingArguments, entry: ParameterPlan, plan: ShardingPlan, mesh: DeviceMesh) -> UpdateRule:
    rule, stacked = rule_of(args.optim, entry.name, entry.shape), is_stacked(entry.name)
    if rule == "adamw":
        return AdamW(args.adam_beta1, args.adam_beta2, args.adam_epsilon)
    numbers = args.optimizer_numbers
    if rule == "lion":
        return Lion(**numbers)
    if rule == "muon":
        return Muon(**numbers, matrices=Matrices(mesh, plan.specs[entry.name][int(stacked) :]), stacked=stacked)
    return Adafactor(**numbers, stacked=stacked)


def decay_names(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that weight decay applies to: by transformers' own rule, all but biases and norms."""
    names = get_parameter_names(model, [nn.LayerNorm], NO_DECAY)
    return frozenset(names) & frozenset(name for name, _ in model.named_parameters())


def global_norm(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients as if they were one vector, in fp32; a 0-d tensor."""
    return torch.sqrt(torch.stack([gradient.float().pow(2).sum() for gradient in gradients]).sum())


def clip_factor(norm: torch.Tensor, max_norm: float) -> torch.Tensor:
    """The factor that brings gradients of norm ``norm`` to at most ``max_norm``, as `clip_grad_norm_` computes it."""
    return torch.clamp(max_norm / (norm + 1e-6), max=1.0)
