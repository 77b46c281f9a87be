"""The generator of a placed model, and the decoder that answers prompts with it."""

from __future__ import annotations

from dataclasses import replace

from shardwright.evaluation.decoders import CachedDecoder, RowDecoder
from shardwright.evaluation.generate import GenerationShape, Generator, Sampling, can_cache, check_positions
from shardwright.layout.mesh import SEQUENCE
from shardwright.models.attention import attention_interface as attention
from shardwright.models.layers.prefetch_barrier import prepare_in_turn
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.build import loss_of, on_mesh
from shardwright.step.placed_model import PlacedModel
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_buffers


def build_generator(placed: PlacedModel, shape: GenerationShape, sampling: Sampling) -> Generator:
    """A generator with the model and the weights of ``placed``, which stay where they are.

    With a cache the layers run one by one, each on its slice of a stack: a cache is a tensor for each layer. Where
    transformers has no cache of one shape for the model, each token is computed from the whole row.

    Raises UserError if the model has fewer positions than ``shape``.
    """
    job, mesh, batch = placed.job, placed.mesh, placed.batch_axes
    heads = tuple(axis for axis in job.plan.mesh if axis not in (*batch, SEQUENCE))
    check_positions(job.facts, shape.length)
    if not can_cache(job.model):
        return Generator(RowDecoder(placed, shape, sampling), shape)
    plain = replace(job, recipe=replace(job.recipe, compute=replace(job.recipe.compute, scan=False, remat="none")))
    by_rows = {
        pattern: {axis: placement for axis, placement in layout.items() if placement.is_shard(0)}
        for pattern, layout in job.recipe.activations.items()
    }
    model = on_mesh(plain, mesh, by_rows)  # a decoded token has no sequence to split
    attention.choose(model, attention.MASKED)
    live = LiveWeights(placed.model, job.stored, mesh, placed.parameters)

    def parameters() -> Tensors:
        place_buffers(model, mesh, live)
        found: Tensors = {}
        for name, parameter in placed.parameters.items():
            members = job.stored.members(name)
            found |= dict(zip(members, [parameter] if members == [name] else parameter.unbind(0), strict=True))
        return found

    loss = loss_of(plain, model, mesh, None)
    loss.pieces = None
    loss.inside = prepare_in_turn(model, loss.prepare)
    return Generator(CachedDecoder(loss, parameters, mesh, (batch, heads), shape, sampling), shape)
