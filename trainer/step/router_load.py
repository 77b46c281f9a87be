"""The load of each expert in a step, and the update of the router biases that balance it."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from shardwright.job import Job
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.routing import DROPPED, LOAD, RouterLosses, mark, selection_biases, watch
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.report.expert_load import ExpertLoad
from shardwright.step.placed_model import PlacedModel
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec
from shardwright.xla.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Routing:
    """The experts of a model, and the selection biases of their routers."""

    mesh: DeviceMesh
    # name of each experts module, in the model's own names and order → its number of experts
    experts: Mapping[str, int]
    # the same modules as they run: name → the own names of those that it stacks, or its own
    stacks: Mapping[str, Sequence[str]]
    # the index of each number of `shares` when stack follows stack, placed; None: they are in order
    order: Tensor | None
    # name → (what a router adds to its scores for selection, placed; the name of its experts as they run)
    biases: Mapping[str, tuple[Tensor, str]] = field(default_factory=dict)
    rate: float = 0.0  # how far a bias moves in a step; 0: it stays

    @property
    def size(self) -> int:
        return sum(count + 1 for count in self.experts.values())

    def shares(self, recorded: Tensors) -> Tensor:
        """For each layer every expert's share of the (token, choice) pairs, then the share dropped: [size]."""
        flat, device = [], next(iter(recorded.values())).device
        for name, own in self.stacks.items():
            count = self.experts[own[0]]
            load = recorded.get(name + LOAD, torch.zeros((len(own), count), device=device))
            dropped = recorded.get(name + DROPPED, torch.zeros_like(load[..., 0])).unsqueeze(-1)
            flat.append((torch.cat([load, dropped], -1) / load.sum(-1, keepdim=True).clamp(min=1)).flatten())
        shares = torch.cat(flat)
        return shares if self.order is None else shares.index_select(0, self.order)

    def dropped_fraction(self, recorded: Tensors) -> Tensor | None:
        """The share of all layers' pairs that was dropped; None where no layer has a capacity."""
        known = [name for name in self.stacks if name + DROPPED in recorded]
        if not known:
            return None
        dropped, pairs = (torch.stack([recorded[n + what].sum() for n in known]).sum() for what in (DROPPED, LOAD))
        return dropped / pairs.clamp(min=1)

    def loads(self, sums: Sequence[float], capacity: bool) -> tuple[ExpertLoad, ...]:
        """The loads in a sum of :meth:`shares` over steps. Layers where nothing was routed are left out."""
        found, numbers = [], iter(sums)
        for name, count in self.experts.items():
            *shares, dropped = itertools.islice(numbers, count + 1)
            if total := sum(shares):
                lost = dropped / total if capacity else None
                found.append(ExpertLoad(name, tuple(share / total for share in shares), lost))
        return tuple(found)

    def update_biases(self, recorded: Tensors, good: Tensor) -> None:
        """Move each bias towards a balanced load, where the step is ``good`` (arXiv:2408.15664, algorithm 1)."""
        for bias, experts in self.biases.values() if self.rate else ():
            load = recorded[experts + LOAD]
            moved = bias + self.rate * torch.sign(load.mean(-1, keepdim=True) - load).reshape(bias.shape)
            kept = torch.where(good, moved.to(bias.dtype), bias)
            bias.copy_(sharding.constrain(kept, self.mesh, (None,) * bias.dim()))


def totals(recorded: Tensors) -> Tensors:
    """Sums over the groups that tokens were counted in: here, once a step, counts cross devices."""
    dims = {LOAD: -2, DROPPED: -1}
    found = {}
    for name, value in recorded.items():
        dim = next((dim for end, dim in dims.items() if name.endswith(end)), None)
        found[name] = value if dim is None else value.sum(dim)
    return found


def router_losses(job: Job) -> RouterLosses:
    args = job.args
    return RouterLosses(args.router_z_loss_coef, args.router_balance_coef, args.router_balance == "batch")


def watch_routing(job: Job, model: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Have the experts of ``model`` record their load, and its routers what :func:`router_losses` needs."""

    def split_rows(tensor: Tensor) -> Tensor:
        return sharding.constrain(tensor, mesh, batch_spec(tensor.dim(), job.plan.batch))

    mark(model, experts_modules(model), job.plan.batch_shards, split_rows)
    if router_losses(job).any:
        watch(model, split_rows)


def make_routing(placed: PlacedModel) -> Routing:
    job, model, parameters = placed.job, placed.model, placed.parameters
    names = job.facts.experts
    experts = {name: len(next(iter(job.model.get_submodule(name).parameters()))) for name in names}
    known, stacks, biases = selection_biases(job.model, names), {}, {}
    for name in experts_modules(model):
        key, _ = next(iter(model.get_submodule(name).named_parameters()))
        stacks[name] = own = [member.removesuffix(f".{key}") for member in job.stored.members(f"{name}.{key}")]
        block, own_block = (f"{each.rpartition('.')[0]}." for each in (name, own[0]))
        for bias in (bias for bias, of in known.items() if of == own[0]):
            where = block + bias.removeprefix(own_block)
            biases[where] = (parameters[where] if where in parameters else model.get_buffer(where), name)
    order = _order(experts, stacks)
    placed_order = None if order is None else sharding.place("order of experts", order, placed.mesh, (None,))
    return Routing(placed.mesh, experts, stacks, placed_order, biases, job.args.router_bias_update_rate)


def _order(experts: Mapping[str, int], stacks: Mapping[str, Sequence[str]]) -> Tensor | None:
    """:attr:`Routing.order`, int32 [size]; None if stack after stack is the order of ``experts``."""
    begins, begin = {}, 0
    for name in (name for own in stacks.values() for name in own):
        begins[name] = begin
        begin += experts[name] + 1
    order = [begins[name] + i for name, count in experts.items() for i in range(count + 1)]
    return None if order == sorted(order) else torch.tensor(order, dtype=torch.int32)
