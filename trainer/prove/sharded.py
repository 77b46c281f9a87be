"""Our side of a proof: the run's own step on virtual devices, in the code that a TPU runs, and what it leaves."""

from collections.abc import Callable, Iterator, Mapping

from torch import Tensor

from shardwright.job import Job
from shardwright.layout.plan import ShardingPlan
from shardwright.models.ops import scopes
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.prove.batches import Batch
from shardwright.prove.trajectory import Trajectory
from shardwright.step.build import place_model
from shardwright.step.placed_model import PlacedModel
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import Source
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh


class WatchedStep(TrainStep):
    """A train step whose gradients are results of its one graph, too."""

    def loss_and_gradients(self, batch: Tensors, random_keys: Tensor) -> tuple[Tensor, Tensors, Tensors]:
        found = super().loss_and_gradients(batch, random_keys)
        self.gradients = found[1]
        return found

    @property
    def replaced(self) -> Tensors:
        return {**super().replaced, **{f"gradient of {name}": g for name, g in self.gradients.items()}}


def run_sharded(
    job: Job, source: Source, batches: list[Batch], learning_rate: float, shown: Callable[[int], None] | None = None
) -> Trajectory:
    """One step of ``job`` a batch, from the weights of ``source``; ``shown`` is called with each step's number.

    Raises UserError if a step compiles again.
    """
    placed = place_model(job, build_mesh(job.recipe.mesh), source)
    with scopes.kept():  # a dump of the program then names modules
        return run_placed(placed, batches, learning_rate, shown)


def run_placed(
    placed: PlacedModel, batches: list[Batch], learning_rate: float, shown: Callable[[int], None] | None = None
) -> Trajectory:
    step, plan, found = WatchedStep(placed), placed.job.stored, Trajectory()
    learned = {name for name in step.moments if name in step.parameters}
    start = _own(plan, {name: step.parameters[name] for name in learned})
    for number, batch in enumerate(batches, 1):
        step(batch, step=number, learning_rate=learning_rate)
        if number == 1:
            found.gradients = _trained(placed.job, _own(plan, step.gradients))
        metrics = step.read_metrics()
        found.losses.append(metrics.loss)
        found.norms.append(metrics.grad_norm)
        if shown is not None:
            shown(number)
    after = _own(plan, {name: step.parameters[name] for name in learned})
    found.changes = _trained(placed.job, {name: values - start[name] for name, values in after.items()})
    kept: dict[str, Tensors] = {}
    for name, tensors in step.moments.items():
        for kind, tensor in zip(step.optimizer.state[name], tensors, strict=True):
            kept.setdefault(kind.name, {})[name] = tensor
    found.state = {kind: _trained(placed.job, _own(plan, tensors)) for kind, tensors in kept.items()}
    return found


def _own(plan: ShardingPlan, placed: Tensors) -> Tensors:
    return dict(unstacked(plan, placed))


def unstacked(plan: ShardingPlan, placed: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Yields (the model's own name, values on the CPU), fetching one placed tensor at a time."""
    for name, tensor in placed.items():
        members = plan.members(name)
        values = sharding.fetch(tensor.detach())
        yield from zip(members, values.unbind() if members != [name] else [values], strict=True)


def _trained(job: Job, tensors: Tensors) -> Tensors:
    """The parameters that take part in the loss: a stack may have layers that do not."""
    return {name: values for name, values in tensors.items() if name not in job.unused[0]}
