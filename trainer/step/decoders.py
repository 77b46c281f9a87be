"""What computes the next tokens of a generation: with a cache of keys and values, or from whole rows without one.

Shape suffixes: R rows, P tokens of a prompt, L tokens of a row, prompt and answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from transformers.cache_utils import Cache, DummyLayer, StaticLayer, get_layer_types_and_kwargs

from models.partial_gradients import Tensors
from trainer.layout.plan import ShardingPlan
from trainer.step.compile_guard import CompileGuard
from trainer.step.generate import GenerationShape, Sampling, choose
from trainer.step.loss import Loss
from trainer.step.placed import Placed
from trainer.xla import sharding
from trainer.xla.batch import batch_spec, place_batch
from trainer.xla.mesh import DeviceMesh
from trainer.xla.runtime import run_now


class CachedDecoder:
    """Decodes with a cache: a graph for the prompts, and one for each further token.

    Prompts stand at the end of their P tokens, behind padding that nothing sees, so that all rows go on at the same
    place of the cache. Layers of a sliding window have a cache of all L tokens too: a window that moved in it would be
    another graph. What a token sees is said by transformers' own masks.

    Args:
        loss: of the model whose layers run one by one, with an attention that takes masks.
        parameters: gives its parameters, as they are now.
        axes: the mesh axes that split rows, and those that split heads where they can.
    """

    def __init__(
        self,
        loss: Loss,
        parameters: Callable[[], Tensors],
        mesh: DeviceMesh,
        axes: tuple[tuple[str, ...], tuple[str, ...]],
        shape: GenerationShape,
        sampling: Sampling,
    ) -> None:
        self.loss, self.parameters, self.mesh, self.shape, self.sampling = loss, parameters, mesh, shape, sampling
        self.rows, self.heads = axes
        self.guards = [CompileGuard("prompts of a generation", 1), CompileGuard("next token of a generation", 1)]

    @property
    def compiles(self) -> int:
        """Compiles so far."""
        return sum(guard.compiles for guard in self.guards)

    def begin(self, prompts: Sequence[Sequence[int]], uniform: torch.Tensor) -> torch.Tensor:
        """As :class:`trainer.step.generate.Decoder` says."""
        tokens = torch.zeros(self.shape.rows, self.shape.prompt, dtype=torch.int64)
        seen = torch.ones(self.shape.rows, self.shape.length, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            padding = self.shape.prompt - len(prompt)
            tokens[row, padding:] = torch.tensor(prompt)
            seen[row, :padding] = 0
        positions = (seen.cumsum(-1) - 1).clamp(min=0)[:, : self.shape.prompt]
        self.cache = _cache(self.loss.model.config, self.shape.length)
        self._parameters = self.parameters()
        batch = {"input_ids": tokens, "attention_mask": seen, "position_ids": positions, "uniform": uniform}
        self.guards[0].before(batch)
        placed = place_batch(batch, self.mesh, self.rows)
        uniform, self._seen = placed.pop("uniform"), placed["attention_mask"]
        self._advance(placed, uniform)
        self.guards[0].after()
        return self.token

    def next(self, uniform: torch.Tensor) -> torch.Tensor:
        """As :class:`trainer.step.generate.Decoder` says."""
        self.guards[1].before({"uniform": uniform})
        placed = place_batch({"uniform": uniform}, self.mesh, self.rows)
        token = self._by_rows(self.token.unsqueeze(-1))
        inputs = {"input_ids": token, "attention_mask": self._seen, "position_ids": self._position}
        self._advance(inputs, placed["uniform"])
        self.guards[1].after()
        return self.token

    def end(self) -> None:
        """As :class:`trainer.step.generate.Decoder` says."""
        del self.cache, self.token, self._parameters, self._seen, self._position

    def _advance(self, inputs: Tensors, uniform: torch.Tensor) -> None:
        """Run the model on ``inputs``, which come next in the cache; the token behind them is then ``token`` [R]."""
        with torch.no_grad():
            given: dict[str, Any] = {**inputs, "past_key_values": self.cache, "use_cache": True}
            logits = self._by_rows(self.loss.logits(self._parameters, given)[:, -1])
            self.token = sharding.constrain(choose(logits, self.sampling, uniform), self.mesh, (None,))
            self._position = self._by_rows(inputs["position_ids"][:, -1:] + 1)
            state = [self.token, self._position]
            for layer in self.cache.layers:
                if isinstance(layer, StaticLayer) and layer.keys is not None and layer.values is not None:
                    for tensor in (layer.keys, layer.values):
                        tensor.copy_(sharding.constrain(tensor, self.mesh, self._cache_spec(tensor)))
                        state.append(tensor)
                    state.append(layer.cumulative_length)
        run_now(state)

    def _by_rows(self, tensor: torch.Tensor) -> torch.Tensor:
        return sharding.constrain(tensor, self.mesh, batch_spec(tensor.dim(), self.rows))

    def _cache_spec(self, tensor: torch.Tensor) -> Any:
        sizes, parts = self.mesh.shape(), 1
        for axis in self.heads:
            parts *= sizes[axis]
        heads = self.heads if self.heads and tensor.shape[1] % parts == 0 else None
        return (self.rows, heads, None, None)


def _cache(config: Any, length: int) -> Cache:
    kinds, _ = get_layer_types_and_kwargs(config.get_text_config(decoder=True))
    return Cache(layers=[DummyLayer() if kind == "dummy" else StaticLayer(length) for kind in kinds])


class RowDecoder:
    """Decodes without a cache: one graph computes the whole row for each token, whatever its layers are."""

    def __init__(self, loss: Loss, placed: Placed, shape: GenerationShape, sampling: Sampling) -> None:
        self.loss, self.placed, self.shape, self.sampling = loss, placed, shape, sampling
        self.guard = CompileGuard("next token of a generation", 1)

    @property
    def compiles(self) -> int:
        """Compiles so far."""
        return self.guard.compiles

    def begin(self, prompts: Sequence[Sequence[int]], uniform: torch.Tensor) -> torch.Tensor:
        """As :class:`trainer.step.generate.Decoder` says."""
        tokens = torch.zeros(self.shape.rows, self.shape.length, dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        last = torch.tensor([[len(prompt) - 1] for prompt in prompts])
        placed = place_batch({"tokens": tokens, "last": last}, self.placed.mesh, self.placed.batch_axes)
        self._tokens, self._last = placed["tokens"], placed["last"]
        return self.next(uniform)

    def next(self, uniform: torch.Tensor) -> torch.Tensor:
        """As :class:`trainer.step.generate.Decoder` says."""
        mesh, axes = self.placed.mesh, self.placed.batch_axes
        self.guard.before({"uniform": uniform})
        drawn = place_batch({"uniform": uniform}, mesh, axes)["uniform"]
        with torch.no_grad():
            logits = self.loss.logits(self.placed.parameters, {"input_ids": self._tokens})
            places = torch.arange(self.shape.length, device=logits.device)
            there = (places == self._last).unsqueeze(-1)
            token = choose(torch.where(there, logits, 0.0).sum(1), self.sampling, drawn)
            token = sharding.constrain(token, mesh, (None,))
            following = torch.where(places == self._last + 1, token.unsqueeze(-1), self._tokens)
            self._tokens = sharding.constrain(following, mesh, batch_spec(2, axes))
            self._last = sharding.constrain(self._last + 1, mesh, batch_spec(2, axes))
        run_now([token, self._tokens, self._last])
        self.guard.after()
        return token

    def end(self) -> None:
        """As :class:`trainer.step.generate.Decoder` says."""
        del self._tokens, self._last


def unstacked(plan: ShardingPlan, parameters: Mapping[str, torch.Tensor]) -> Tensors:
    """Each layer's parameters by the model's own names: slices of the stacks, where there are stacks."""
    found: Tensors = {}
    for name, parameter in parameters.items():
        members = plan.members(name)
        slices = [parameter] if members == [name] else parameter.unbind(0)
        found |= dict(zip(members, slices, strict=True))
    return found
