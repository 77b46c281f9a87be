"""A step's updates of the parameters: each one's optimizer and state, and which decay."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.trainer_pt_utils import get_parameter_names

from shardwright.arguments.training import TrainingArguments
from shardwright.layout.partition import PartitionSpec, axes_of, partition_spec
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.stacking import is_stacked
from shardwright.optimizers.optimizer import Axes, OnMesh, Optimizer, State, Update
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh

# the names that transformers' own Trainer keeps weight decay away from (`Trainer.get_decay_parameter_names`, 5.23)
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


@dataclass(frozen=True)
class ParameterUpdates:
    """The rules that update the parameters, by their names."""

    rules: Mapping[str, Optimizer]
    layouts: Mapping[str, OnMesh]
    state: Mapping[str, tuple[ParameterPlan, ...]]  # in the order in which the rule takes them
    specs: Mapping[str, tuple[PartitionSpec, ...]]  # of the state
    weight_decay: float
    decay: frozenset[str]  # names of the parameters that it applies to

    def update(
        self, name: str, parameter: Tensor, gradient: Tensor, state: State, learning_rate: Tensor, step: Tensor
    ) -> tuple[Tensor, State]:
        """The parameter and its state after update number ``step`` (from 1), computed and returned in float32."""
        parameter, state = parameter.to(torch.float32), tuple(tensor.to(torch.float32) for tensor in state)
        decay, layout = self.weight_decay if name in self.decay else 0.0, self.layouts[name]
        return self.rules[name].update(Update(parameter, gradient, state, learning_rate, step, decay, layout))


def make_updates(args: TrainingArguments, plan: ShardingPlan, mesh: DeviceMesh, model: nn.Module) -> ParameterUpdates:
    """The updates that ``args`` ask for of the parameters that ``plan`` trains: those of ``model``, as stored."""
    axes, entries = tuple(plan.mesh), [entry for entry in plan.parameters if entry.trained]
    state = {entry.name: plan.state_of(entry.name) for entry in entries}
    specs = {
        name: tuple(partition_spec(kept.layout, len(kept.shape), axes) for kept in both) for name, both in state.items()
    }
    rules = {entry.name: args.rule(entry.optimizer(args.optim)) for entry in entries}
    layouts = {entry.name: lay_on(mesh, plan.specs[entry.name], is_stacked(entry.name)) for entry in entries}
    # by transformers' own rule, all but biases and norms decay
    decay = frozenset(get_parameter_names(model, [nn.LayerNorm], NO_DECAY)) & {n for n, _ in model.named_parameters()}
    return ParameterUpdates(rules, layouts, state, specs, args.weight_decay, decay)


def lay_on(mesh: DeviceMesh, spec: PartitionSpec, stacked: bool) -> OnMesh:
    def constrain(tensor: Tensor, axes: Axes) -> Tensor:
        return sharding.constrain(tensor, mesh, tuple(entry or None for entry in axes))

    return OnMesh(mesh.shape(), tuple(axes_of(entry) for entry in spec), stacked, constrain)
