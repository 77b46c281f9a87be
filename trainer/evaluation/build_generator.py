"""The generator of a job: its model on a mesh, and the decoder that answers prompts with it."""

from __future__ import annotations

from dataclasses import replace

from shardwright.evaluation.decoders import CachedDecoder, RowDecoder, unstacked
from shardwright.evaluation.generate import GenerationShape, Generator, Sampling, can_cache, check_positions
from shardwright.job import Job
from shardwright.layout.mesh import SEQUENCE
from shardwright.models.attention import attention_interface as attention
from shardwright.models.layers.prefetch_barrier import prepare_in_turn
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.build import _make_loss, _on_mesh
from shardwright.step.eval_step import EvalStep
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_buffers


def build_generator(job: Job, step: EvalStep, shape: GenerationShape, sampling: Sampling) -> Generator:
    """What continues texts with the model and the weights of ``step``, which stay where they are.

    With a cache the layers run one by one, each on its slice of a stack: a cache is a tensor for each layer. Where
    transformers has no cache of one shape for the model, each token is computed from the whole row.

    Raises:
        UserError: the model has not as many positions as ``shape``.
    """
    mesh, batch = step.placed.mesh, job.recipe.batch
    heads = tuple(axis for axis in job.plan.mesh if axis not in (*batch, SEQUENCE))
    check_positions(job.facts, shape.length)
    if not can_cache(job.model):
        return Generator(RowDecoder(step.loss, step.placed, shape, sampling), shape)
    plain = replace(job, recipe=replace(job.recipe, compute=replace(job.recipe.compute, scan=False, remat="none")))
    by_rows = {
        pattern: {axis: placement for axis, placement in layout.items() if placement.is_shard(0)}
        for pattern, layout in job.recipe.activations.items()
    }
    model = _on_mesh(plain, mesh, by_rows)  # a decoded token has no sequence to split
    attention.choose(model, attention.MASKED)
    live = LiveWeights(step.loss.model, job.stored, mesh, step.placed.parameters)

    def parameters() -> Tensors:
        place_buffers(model, mesh, live)
        return unstacked(job.stored, step.placed.parameters)

    loss = _make_loss(plain, model, mesh, None)
    loss.pieces = None
    loss.inside = prepare_in_turn(model, loss.prepare)
    return Generator(CachedDecoder(loss, parameters, mesh, (batch, heads), shape, sampling), shape)
