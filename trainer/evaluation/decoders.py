"""Decoders: the next tokens of a generation, with a cache of keys and values, or from whole rows without one.

:func:`build_generator` chooses the one that a placed model can have.

Shape suffixes: R rows, P tokens of a prompt, L tokens of a row, prompt and answer.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, StaticLayer, get_layer_types_and_kwargs

from shardwright.evaluation import generate
from shardwright.evaluation.generate import TOKEN, GenerationShape, Generator, Sampling
from shardwright.layout.mesh import SEQUENCE
from shardwright.layout.partition import PartitionSpec
from shardwright.models.attention import attention_interface as attention
from shardwright.models.layers.prefetch_barrier import prepare_in_turn
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.build import loss_of, on_mesh
from shardwright.step.compile_guard import CompileGuard
from shardwright.step.loss import Loss
from shardwright.step.placed_model import PlacedModel
from shardwright.weights.on_devices import LiveWeights
from shardwright.weights.place import place_buffers
from shardwright.xla import sharding
from shardwright.xla.batch import batch_spec, place_batch
from shardwright.xla.device_mesh import DeviceMesh

PROMPTS, NEXT_TOKEN = "prompts of a generation", "next token of a generation"  # names of the graphs


class CachedDecoder:
    """Decodes with a cache: a graph for the prompts, and one for each further token.

    Prompts stand at the end of their P tokens, behind padding that nothing sees, so that all rows go on at the same
    place of the cache. Layers of a sliding window have a cache of all L tokens too: a window that moved in it would be
    another graph. transformers' own masks say which tokens see each other.
    """

    def __init__(
        self,
        loss: Loss,  # of the model whose layers run one by one, with an attention that takes masks
        parameters: Callable[[], Tensors],
        mesh: DeviceMesh,
        axes: tuple[tuple[str, ...], tuple[str, ...]],  # that split rows, and that split heads where they can
        shape: GenerationShape,
        sampling: Sampling,
    ) -> None:
        self.loss, self.parameters, self.mesh, self.shape, self.sampling = loss, parameters, mesh, shape, sampling
        self.rows, self.heads = axes
        self.guards = (CompileGuard(PROMPTS, 1), CompileGuard(NEXT_TOKEN, 1))
        self._token: torch.Tensor  # [R], the last
        self._position: torch.Tensor  # [R, 1], where it stands

    def begin(self, prompts: Sequence[Sequence[int]], uniform: torch.Tensor) -> Tensors:
        tokens = torch.zeros(self.shape.rows, self.shape.prompt, dtype=torch.int64)
        seen = torch.ones(self.shape.rows, self.shape.length, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padding = self.shape.prompt - len(prompt)
            tokens[row, padding:] = torch.tensor(prompt)
            seen[row, :padding] = 0
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, : self.shape.prompt]
        kinds, _ = get_layer_types_and_kwargs(self.loss.model.config.get_text_config(decoder=True))
        length = self.shape.length
        self.cache = Cache(layers=[DummyLayer() if kind == "dummy" else StaticLayer(length) for kind in kinds])
        self._parameters = self.parameters()
        batch = {"input_ids": tokens, "attention_mask": seen, "position_ids": positions, "uniform": uniform}
        placed = place_batch(batch, self.mesh, self.rows)
        uniform, self._seen = placed.pop("uniform"), placed["attention_mask"]
        return self._advance(placed, uniform)

    def next(self, uniform: torch.Tensor) -> Tensors:
        placed = place_batch({"uniform": uniform}, self.mesh, self.rows)
        inputs = {
            "input_ids": self._laid_out(self._token.unsqueeze(-1)),
            "attention_mask": self._seen,
            "position_ids": self._position,
        }
        return self._advance(inputs, placed["uniform"])

    def as_if_run(self) -> None:
        """On an abstract mesh: place the last graph's results, without data, so that the next graph can be lowered."""
        self._token = self._placed("token", self._token)
        self._position = self._placed("position", self._position)
        for name, (layer, key) in self._cached().items():
            setattr(layer, key, self._placed(name, getattr(layer, key)))

    def spec_of(self, tensor: torch.Tensor) -> PartitionSpec:
        if tensor.dim() < 4:
            return batch_spec(2, self.rows) if tensor.dim() == 2 else (None,) * tensor.dim()
        return (self.rows, self._splitting(tensor.shape[1]), None, None)

    def end(self) -> None:
        del self.cache, self._token, self._parameters, self._seen, self._position

    def _advance(self, inputs: Tensors, uniform: torch.Tensor) -> Tensors:
        """Build the graph of the model on the ``inputs`` that come next in the cache; returns its results by name."""
        with torch.no_grad():
            taken = inspect.signature(self.loss.model.forward).parameters
            name = "cache" if "cache" in taken else "past_key_values"  # transformers 5.24 and 5.23
            given: dict[str, Any] = {**inputs, name: self.cache, "use_cache": True}
            if "logits_to_keep" in taken:  # as generate() does
                given["logits_to_keep"] = 1
            logits = self.loss.logits(self._parameters, given)[:, -1]
            # first as the head is split: for few rows the partitioner would gather the head instead of the logits
            logits = sharding.constrain(logits, self.mesh, (self.rows, self._splitting(logits.shape[1])))
            logits = self._laid_out(logits)
            self._token = self._laid_out(generate.choose(logits, self.sampling, uniform))
            self._position = self._laid_out(inputs["position_ids"][:, -1:] + 1)
            cached = {name: getattr(layer, key) for name, (layer, key) in self._cached().items()}
            for tensor in cached.values():
                if tensor.dim():
                    tensor.copy_(self._laid_out(tensor))
        return {TOKEN: self._token, "next position": self._position, **cached}

    def _cached(self) -> dict[str, tuple[StaticLayer, str]]:
        return {
            f"{key} of layer {number}": (layer, key)
            for number, layer in enumerate(self.cache.layers)
            if isinstance(layer, StaticLayer) and layer.is_initialized
            for key in ("keys", "values", "cumulative_length")
        }

    def _splitting(self, size: int) -> tuple[str, ...] | None:
        """The axes that split heads, if they divide ``size``."""
        parts = math.prod(self.mesh.shape()[axis] for axis in self.heads)
        return self.heads if self.heads and size % parts == 0 else None

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return sharding.constrain(tensor, self.mesh, self.spec_of(tensor))

    def _placed(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        return sharding.place(name, tensor, self.mesh, self.spec_of(tensor))


class RowDecoder:
    """Decodes without a cache: one graph computes the whole row for each token, whatever its layers are."""

    def __init__(self, placed: PlacedModel, shape: GenerationShape, sampling: Sampling) -> None:
        self.placed, self.shape, self.sampling = placed, shape, sampling
        self.guards = (CompileGuard(NEXT_TOKEN, 1),)

    def begin(self, prompts: Sequence[Sequence[int]], uniform: torch.Tensor) -> Tensors:
        tokens = torch.zeros(self.shape.rows, self.shape.length, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        last = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        placed = place_batch({"tokens": tokens, "last": last}, self.placed.mesh, self.placed.batch_axes)
        self._tokens, self._last = placed["tokens"], placed["last"]
        return self.next(uniform)

    def next(self, uniform: torch.Tensor) -> Tensors:
        drawn = place_batch({"uniform": uniform}, self.placed.mesh, self.placed.batch_axes)["uniform"]
        with torch.no_grad():
            logits = self.placed.loss.logits(self.placed.parameters, {"input_ids": self._tokens})
            places = torch.arange(self.shape.length, device=logits.device)
            there = (places == self._last).unsqueeze(-1)
            token = self._laid_out(generate.choose(torch.where(there, logits, 0.0).sum(1), self.sampling, drawn))
            self._tokens = self._laid_out(torch.where(places == self._last + 1, token.unsqueeze(-1), self._tokens))
            self._last = self._laid_out(self._last + 1)
        return {TOKEN: token, "next tokens": self._tokens, "next last": self._last}

    def spec_of(self, tensor: torch.Tensor) -> PartitionSpec:
        return batch_spec(2, self.placed.batch_axes) if tensor.dim() == 2 else (None,)

    def end(self) -> None:
        del self._tokens, self._last

    def _laid_out(self, tensor: torch.Tensor) -> torch.Tensor:
        return sharding.constrain(tensor, self.placed.mesh, self.spec_of(tensor))


def build_generator(placed: PlacedModel, shape: GenerationShape, sampling: Sampling) -> Generator:
    """A generator with the model and the weights of ``placed``, which stay where they are.

    With a cache the layers run one by one, each on its slice of a stack: a cache is a tensor for each layer. Where
    transformers has no cache of one shape for the model, each token is computed from the whole row.

    Raises UserError if the model has fewer positions than ``shape``.
    """
    job, mesh, batch = placed.job, placed.mesh, placed.batch_axes
    heads = tuple(axis for axis in job.plan.mesh if axis not in (*batch, SEQUENCE))
    generate.check_positions(job.facts, shape.length)
    if not generate.can_cache(job.model):
        return Generator(RowDecoder(placed, shape, sampling), shape)
    plain = replace(job, recipe=job.recipe.computing(scan=False, remat="none"))
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
