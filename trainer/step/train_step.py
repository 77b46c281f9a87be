"""TrainStep: forward, backward, gradient layout, accumulation, clipping and update as one XLA computation.

Nothing in it reads the device: the learning rate and the step's number go in as data, and the metrics stay there until
`read_metrics`. A loss that is not finite turns the update into a no-op on the device itself: the last good state is
kept, although the host hears of it only at the next logging step.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.files.arrays import Array, Stack
from shardwright.job import Job
from shardwright.layout.partition import PartitionSpec
from shardwright.layout.plan import ParameterPlan
from shardwright.models.layers.embedding_noise import ROW_KEYS
from shardwright.models.ops import random_bits, scopes
from shardwright.models.ops.labels import scored_tokens
from shardwright.models.ops.partial_gradients import SUFFIX, Tensors
from shardwright.models.ops.while_loop import run_turns
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.parameter_updates import make_updates
from shardwright.step.placed_model import PlacedModel
from shardwright.step.router_load import make_routing, totals
from shardwright.step.spikes import spike_watch
from shardwright.step.step_metrics import MetricsLayout, StepMetrics
from shardwright.weights.weight_sources import Source
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch


class TrainStep:
    """One optimizer step on a global batch; parameters and optimizer state are updated in place, on the device.

    A parameter that takes no part in the loss stays as it is, as torch's optimizers leave one whose ``grad`` is None.
    It has neither gradient nor state, unless it is a stack with other layers that take part. A batch without a scored
    token changes nothing but the count of such steps, not even the optimizer's own count of updates; the step's number,
    which counts the data, and the learning rate go on.

    ``restored`` has saved values of the optimizer's state and of metrics, by their names in :attr:`state`; None: zeros.
    ``z_loss`` is the saved run's coefficient; None: this one's.

    Raises:
        UserError: no parameter takes part in the loss.
    """

    def __init__(self, placed: PlacedModel, restored: Source | None = None, z_loss: float | None = None) -> None:
        job, args = placed.job, placed.job.args
        self.placed, self.loss, self.mesh, self.parameters = placed, placed.loss, placed.mesh, placed.parameters
        self.trained = job.trained  # name → whether it takes part in the loss, for each layer of a stack
        self.optimizer = optimizer = make_updates(args, job.stored, placed.mesh, placed.model)
        self.routing, self.spikes = make_routing(placed), spike_watch(args)
        self.accumulation, self.seed = args.gradient_accumulation_steps, args.seed
        self.max_grad_norm, self._moment_dtype = args.max_grad_norm, args.state_dtypes["optimizer_dtype"]
        restored = restored and functools.partial(_restored_or_zeros, job, restored)
        self.specs = {**placed.specs, **{name: partial.spec for name, partial in self.loss.partials.items()}}
        # The state is made here, sharded: made by the first step, it would be replicated, or the weights would move.
        # By parameter, in the order of `optimizer.state`, such as AdamW's two moments.
        self.moments = {
            name: tuple(self._placed_state(name, *of, restored) for of in zip(kept, optimizer.specs[name], strict=True))
            for name, kept in optimizer.state.items()
            if self._learns(name)
        }
        self.layout = MetricsLayout(self.loss.logged, self.routing, self.spikes)
        metrics = self.layout.start(restored, self.loss.logged if z_loss is None else self.loss.logged_with(z_loss))
        self.metrics = sharding.place("metrics", metrics, self.mesh, (None,))
        lengths = job.row_lengths  # a compile for each
        self.guards = {length: CompileGuard(step_name(length, lengths), 1) for length in lengths}
        self.metrics_read = True  # so the next step begins a new mean

    def __call__(self, batch: Tensors, *, step: int, learning_rate: float) -> None:
        """Run step number ``step`` (from 1) on host tensors of [rows, ...]: all micro-batches' rows together."""
        guard = self.guards.get(batch["input_ids"].shape[1], next(reversed(self.guards.values())))

        def trace(batch: Tensors) -> Tensors:
            inputs = self.trace(batch, step=step, learning_rate=learning_rate)
            if guard.first:
                planned = {name: batch_spec(t.dim(), self.placed.batch_axes) for name, t in inputs.items()}
                sharding.check_placed(inputs, self.mesh, planned)
            self.metrics_read = False
            return self.replaced

        guard.run(batch, trace)

    @property
    def compiles(self) -> int:
        """So far: one for each length of rows that it has met."""
        return sum(guard.compiles for guard in self.guards.values())

    @property
    def begun(self) -> bool:
        """Whether a step was taken; before, nothing was learned."""
        return not all(guard.first for guard in self.guards.values())

    @property
    def replaced(self) -> Tensors:
        """Everything that a step replaces, by name: the learning part of :attr:`state`, and buffers of the model."""
        moved = self.routing.biases if self.routing.rate else {}
        learned = {name: t for name, t in self.state.items() if name not in self.parameters or self._learns(name)}
        return {**learned, **{name: bias for name, (bias, _) in moved.items()}}

    @property
    def state(self) -> Tensors:
        """Parameters, optimizer state and metrics, by name: a checkpoint's tensors beside the model's buffers."""
        moments = {
            f"{name} {kept.name}": tensor
            for name, tensors in self.moments.items()
            for kept, tensor in zip(self.optimizer.state[name], tensors, strict=True)
        }
        return {**self.parameters, **moments, "metrics": self.metrics}

    def trace(self, batch: Tensors, *, step: int, learning_rate: float) -> Tensors:
        """Build the step's graph, which ends in :attr:`replaced`, and run nothing; returns the batch as placed."""
        scalars = torch.tensor([learning_rate, float(step), float(self.metrics_read)])
        split = {name: _by_micro_batch(t, self.accumulation) for name, t in batch.items()}
        inputs = place_batch(split, self.mesh, self.placed.batch_axes)
        self._trace(inputs, sharding.place("scalars", scalars, self.mesh, (None,)), self.random_keys(step))
        return inputs

    def random_keys(self, step: int) -> Tensor:
        """The keys that all random numbers of step number ``step`` are drawn from, int32 [micro-batches, 2]."""
        words = [random_bits.key_of(f"{self.seed}/{step}/{micro}") for micro in range(self.accumulation)]
        return sharding.place("random keys", torch.tensor(words, dtype=torch.int32), self.mesh, (None, None))

    def read_metrics(self, *, and_begin_anew: bool = True) -> StepMetrics:
        """Fetch the metrics: a run's one device-to-host transfer, made on logging steps. The means begin anew."""
        values = self.metrics.cpu().tolist()
        self.metrics_read |= and_begin_anew
        return self.layout.read(values, self.loss.router_losses.any)

    def _trace(self, batch: Tensors, scalars: Tensor, random_keys: Tensor) -> None:
        learning_rate, step, fresh = scalars.unbind()
        loss, gradients, recorded = self.loss_and_gradients(batch, random_keys)
        # the 2-norm of all gradients as if they were one vector
        norm = torch.sqrt(torch.stack([gradient.float().pow(2).sum() for gradient in gradients.values()]).sum())
        layout, metrics = self.layout, self.metrics
        finite = torch.isfinite(loss) & torch.isfinite(norm)
        good = finite & (layout.number(metrics, "bad_step") == 0)
        scored = scored_tokens(batch["labels"]) > 0
        updates = step - layout.number(metrics, "unscored_steps")  # the optimizer's count of steps
        changes, replaced = good & scored, dict[str, Tensor]()
        with torch.no_grad(), scopes.scope("optimizer"):
            if (spikes := self.spikes) is not None:
                watched = metrics[layout.slots["spikes"]]
                spike, ends, after = spikes.judged(watched, (step, loss, norm), changes)
                good, changes, updates = good & ~ends, changes & ~spike, updates - spikes.skipped(watched)
                replaced["spikes"] = after
            self._update_parameters(gradients, norm, changes, (learning_rate, updates))
            self.routing.update_biases(recorded, changes)
            # the metrics, whose sums begin anew where `fresh` is above 0
            zero, dropped = torch.zeros_like(loss), self.routing.dropped_fraction(recorded)
            added = {"loss": loss, "grad_norm": norm, "dropped_fraction": zero - 1 if dropped is None else dropped}
            added = {**recorded, **added, "steps": zero + 1, "bad_step": zero}
            before, unscored = (metrics[layout.slots[name]] for name in ("gathered", "unscored_steps"))
            sums = torch.where(fresh > 0, torch.zeros_like(before), before)
            new = torch.stack([added.get(name, zero) for name in layout.names])
            if self.routing.experts:
                new = torch.cat([new, self.routing.shares(recorded)])
            new = torch.where(scored, new, torch.zeros_like(new)) + sums
            bad_step = layout.number(metrics, "bad_step")
            replaced = {
                "grad_norm": torch.where(scored, norm, layout.number(before, "grad_norm")),
                "bad_step": torch.where(good | (bad_step != 0), bad_step, step),
                "unscored_steps": torch.where(scored, unscored, unscored + 1),
                **replaced,
            }
            metrics.copy_(sharding.constrain(layout.with_replaced(new, replaced), self.mesh, (None,)))

    def _update_parameters(
        self, gradients: Tensors, norm: Tensor, good: Tensor, scalars: tuple[Tensor, Tensor]
    ) -> None:
        """Update every parameter with a gradient where the step is ``good``; ``scalars``: learning rate, updates."""
        limit, factor = self.max_grad_norm, torch.ones_like(norm)
        if limit > 0:  # as `clip_grad_norm_` computes it
            factor = torch.clamp(limit / (norm + 1e-6), max=1.0)
        for name in self.moments:
            parameter = self.parameters[name]
            news = olds = (parameter, *self.moments[name])
            if name in gradients:
                gradient = gradients[name].to(torch.float32) * factor
                updated, moments = self.optimizer.update(name, parameter, gradient, self.moments[name], *scalars)
                news = (updated, *moments)
            specs = (self.specs[name], *self.optimizer.specs[name])
            # all are written: a tensor that is not would leave the graph
            for old, new, spec in zip(olds, news, specs, strict=True):
                changes = good if all(self.trained.get(name, ())) else self._where_trained(name, good.expand_as(old))
                kept = torch.where(changes, new.to(old.dtype), old)
                old.copy_(sharding.constrain(kept, self.mesh, spec))

    def _placed_state(self, name: str, kept: ParameterPlan, spec: PartitionSpec, restored: Source | None) -> Tensor:
        full, dtype = f"{name} {kept.name}", self._moment_dtype
        if restored:
            return sharding.place(full, restored(full), self.mesh, spec, dtype)
        return sharding.zeros(full, kept.shape, dtype, self.mesh, spec)

    def _learns(self, name: str) -> bool:
        """Whether a parameter, or the one of a partial gradient, takes part in the loss in any layer."""
        return any(self.trained.get(name.removesuffix(SUFFIX), (True,)))

    def _where_trained(self, name: str, tensor: Tensor) -> Tensor:
        """``tensor``, with 0 for layers with no part in the loss."""
        layers = self.trained.get(name.removesuffix(SUFFIX), ())
        if all(layers):
            return tensor
        flags = [tensor.new_full((1,) * tensor.dim(), trained) for trained in layers]
        return tensor * torch.cat(flags)

    def loss_and_gradients(self, batch: Tensors, random_keys: Tensor) -> tuple[Tensor, Tensors, Tensors]:
        """Loss, gradients laid out as parameters (none outside the loss), metrics of [rows, micro-batches, ...]."""
        count, batch = self.accumulation, self._with_row_keys(batch, random_keys)
        # The mean over micro-batches of sum / (tokens / count): tokens weigh equally whichever micro-batch they are in,
        # and an auxiliary loss, which is a mean already, is averaged. Other objectives' counts weigh equally too.
        tokens = self.loss.objective.counts(batch).clamp(min=1) / count  # the loss of no tokens is 0, not 0/0
        if count == 1:
            micro_batch = {k: t.squeeze(1) for k, t in batch.items()}
            loss, gradients, recorded = self._micro_batch(self.parameters, micro_batch, tokens, random_keys[0])
            return loss, gradients, totals(recorded)

        partials = self.loss.partials
        found: set[str] = set()

        def zero_partials() -> Tensors:
            return {k: partial.zeros(self.parameters[partial.parameter]) for k, partial in partials.items()}

        def body(carry: Any, micro_batch: Tensors, random_key: Tensor) -> tuple[Any, Any]:
            loss_sum, tokens, sums, parameters = carry
            leaves = parameters | zero_partials()
            loss, gradients, recorded = self._micro_batch(leaves, micro_batch, tokens, random_key)
            found.update(gradients)
            sums = sums | {k: self._constrain_gradient(k, sums[k] + g / count) for k, g in gradients.items()}
            return (loss_sum + loss / count, tokens, sums, parameters), recorded

        # Parameters enter through the carry: a loop copies what it closes over, and then the old state is not donated.
        current = {k: p.detach() for k, p in self.parameters.items()}
        zeros = {k: torch.zeros_like(p) for k, p in current.items() if self._learns(k)} | zero_partials()
        zeros = {k: self._constrain_gradient(k, t) for k, t in zeros.items()}
        init = (torch.zeros((), device=tokens.device), tokens, zeros, current)
        (loss, _, sums, _), recorded = self._fold_micro_batches(body, init, batch, random_keys)
        gradients = {k: sums[k] for k in zeros if k in current and found & {k, k + SUFFIX}}
        for k, partial in partials.items():
            if k in found:  # gradients cross devices here, once a step
                gradients[partial.parameter] = gradients[partial.parameter] + partial.total(sums[k])
        gradients = {k: self._constrain_gradient(k, g) for k, g in gradients.items()}
        # counts add up, and a loss is averaged
        recorded = {name: t.mean() if t.dim() == 1 else t.sum(0) for name, t in recorded.items()}
        return loss, gradients, totals(recorded)

    def _with_row_keys(self, batch: Tensors, random_keys: Tensor) -> Tensors:
        """``batch`` [rows, micro-batches, ...] with a key for each row, if its embeddings get noise."""
        if not self.loss.noise:
            return batch
        shape = batch["labels"].shape[:2]
        # from the first micro-batch's key: a row then has the same noise whatever the micro-batches' size
        keys = random_bits.row_keys(random_keys[0], shape.numel()).view(*shape, 2)
        return {**batch, ROW_KEYS: sharding.constrain(keys, self.mesh, batch_spec(3, self.placed.batch_axes))}

    def _fold_micro_batches(
        self, body: Callable[..., tuple[Any, Any]], carry: Any, batch: Tensors, random_keys: Tensor
    ) -> tuple[Any, Any]:
        """``body(carry, micro-batch, random key) -> (carry, y)`` over the micro-batches; the ``y`` are stacked."""

        def run(keys: list[Tensor]) -> tuple[Any, Any]:
            def step(carry: Any, x: tuple[Tensors, list[Tensor]]) -> tuple[Any, Any]:
                micro_batch, own = x
                return body(carry, micro_batch, own[0] if own else torch.zeros_like(random_keys[0]))

            return run_turns(step, carry, ({k: t.transpose(0, 1) for k, t in batch.items()}, keys))

        # the loop gets keys only if the model draws random numbers, as its first trace has shown
        result = run([random_keys] if (known := self.loss.draws) else [])
        return run([random_keys]) if self.loss.draws and not known else result

    def _micro_batch(
        self, parameters: Tensors, batch: Tensors, tokens: Tensor, random_key: Tensor
    ) -> tuple[Tensor, Tensors, Tensors]:
        with torch.enable_grad():
            leaves = {k: p.detach().requires_grad_(self._learns(k)) for k, p in parameters.items()}
            loss, recorded = self.loss(leaves, batch, tokens, training=True, random_key=random_key)
            # on this thread, since each has its own scopes
            wanted = {k: leaf for k, leaf in leaves.items() if leaf.requires_grad}
            with torch.autograd.set_multithreading_enabled(False), scopes.scope("gradients"):
                # a parameter has no gradient of its own where all of its gradient is partial
                found = torch.autograd.grad(loss, list(wanted.values()), allow_unused=True)
        gradients = {
            k: self._constrain_gradient(k, self._where_trained(k, g))
            for k, g in zip(wanted, found, strict=True)
            if g is not None
        }
        return loss.detach(), gradients, recorded

    def _constrain_gradient(self, name: str, gradient: Tensor) -> Tensor:
        return sharding.constrain(gradient, self.mesh, self.specs[name])


def step_name(length: int, lengths: Sequence[int]) -> str:
    return f"train step on rows of {length} tokens" if len(lengths) > 1 else "train step"


def _by_micro_batch(tensor: Tensor, count: int) -> Tensor:
    """[rows*count, ...] -> [rows, count, ...], so that each process's share of the rows has some of each."""
    return tensor.reshape(-1, count, *tensor.shape[1:]) if tensor.dim() else tensor


def let_go(model: nn.Module, step: TrainStep) -> None:
    """Free the memory on the devices, though others still hold ``model`` or ``step``: there may be no room for two."""
    free(model)
    step.parameters.clear()
    step.moments.clear()


def free(model: nn.Module) -> None:
    """Put the parameters of ``model`` on meta."""
    for name, _ in list(model.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, nn.Parameter(torch.empty((), device="meta"), requires_grad=False))


def _restored_or_zeros(job: Job, restored: Source, name: str) -> Array:
    """The restored tensor, or zeros for missing optimizer state: parameters outside the loss when saved had none."""
    parameter, _, moment = name.partition(" ")
    members, layers = job.stored.members(parameter) if moment else [], []
    try:
        return restored(name)
    except KeyError:
        if not members:
            raise
    (kept,) = (kept for kept in job.stored.state_of(parameter) if kept.name == moment)
    for member in members:
        try:
            layers.append(restored(f"{member} {moment}"))
        except KeyError:
            shape = kept.shape if members == [parameter] else kept.shape[1:]
            layers.append(torch.zeros(()).expand(shape))
    return layers[0] if members == [parameter] else Stack(layers)
