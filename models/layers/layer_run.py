"""The layers that a decoder's loop calls: one by one with remat, or a run of layers that repeat as one scan.

The loop calls one callable for each layer. Those of a run only record their arguments, and the last one runs all. So
each layer gets exactly the mask, positions or slice of a tensor that its decoder gives it. Arguments that all layers of
a run share are passed once, and those that differ are stacked.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# semi-private: torch/utils/_pytree.py, torch 2.9
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.models.layers import layer_inputs, side_outputs
from shardwright.models.layers.decoder_loop import UNUSED, LayerOutput
from shardwright.models.layers.graph import Flat, LayerGraph
from shardwright.models.layers.layer_inputs import Call, Input, LoopChanged, RunTensors, as_given, as_passed
from shardwright.models.layers.remat import REMAT, Value
from shardwright.models.layers.scan import Stage, run_stages
from shardwright.models.ops import partial_gradients, randomness, scopes
from shardwright.models.ops.jax_call import lowered_for
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.models.ops.while_loop import Known

# parameters by full name -> the tensors that the layer uses: each, and perhaps its partial gradient's leaf
Prepare = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class LayerPart:
    """One layer of a run's period."""

    name: str  # in the model, as ``model.layers.*``
    layer: nn.Module  # if the run has more than one turn, with parameters stacked along dimension 0
    stacked: frozenset[str] = frozenset()  # the names of its buffers that are stacked likewise
    shape: LayerOutput | None = None  # a run of one layer may do without


class LayerRun:
    """A run of a decoder's layers, from layer ``first``: the layers of ``parts``, ``count`` times over."""

    def __init__(self, parts: Sequence[LayerPart], first: int, count: int = 1) -> None:
        self.parts, self.first, self.count = tuple(parts), first, count
        self.prepare: Prepare = lambda parameters: parameters
        self.partition: Callable[..., Any] = REMAT["none"]
        # the period's traced layers, for each kind of call
        self.graphs: dict[Any, list[_TracedLayer]] = {}
        self.loops: dict[Any, Known] = {}  # and their loops, also by platform and compiler flags
        self._calls: list[Call] = []
        self._promised: list[Tensor | None] = []  # stand-ins for the last called layer's output, until it is computed

    def __getstate__(self) -> dict[str, Any]:
        """Leave the graphs out of a copy, because they run this run's layers."""
        return {**vars(self), "graphs": {}, "loops": {}, "_calls": [], "_promised": []}

    @property
    def values(self) -> list[Value]:
        """The values that one turn could keep for the backward; see :attr:`DecoderLayers.values`."""
        turns = ([value for layer in turn for value in layer.stage.graph.values] for turn in self.graphs.values())
        return next(filter(None, turns), [])

    @property
    def size(self) -> int:
        return len(self.parts) * self.count

    def take(self, offset: int, args: Any, kwargs: Any) -> Any:
        """Return the output of layer ``offset`` of the run: the last layer's result, or a stand-in for another's.

        Raises:
            LoopChanged: the decoder's loop differs from the one recorded when the layers were grouped.
        """
        if offset == 0:
            self._calls, self._promised = [], []
        if offset != len(self._calls):
            raise LoopChanged(f"layer {self.first + offset} is not called after the layer before it")
        call = Call(args, kwargs, self._promised)
        self._calls.append(call)
        if offset + 1 < self.size:
            return self._promise(self.parts[offset % len(self.parts)], call)
        calls, self._calls, self._promised = self._calls, [], []
        return self._run(calls)

    def _promise(self, part: LayerPart, call: Call) -> Any:
        """A stand-in for an output to be computed. It is NaN, so that an early use shows in the loss."""
        assert part.shape is not None
        given = dict(zip(call.paths, call.leaves, strict=True))
        leaves = [_stand_in(given[path]) if path else None for path in part.shape.leaves]
        self._promised = [leaf for leaf, path in zip(leaves, part.shape.leaves, strict=True) if path is not None]
        return tree_unflatten(leaves, part.shape.spec)

    def _run(self, calls: list[Call]) -> Any:
        tensors = layer_inputs.sort_calls(calls, len(self.parts))
        real = side_outputs.real_tokens()
        for j, part in enumerate(self.parts):
            parameters: Tensors = dict(part.layer.named_parameters())
            for name, parameter in (parameters | partial_gradients.of(parameters)).items():
                tensors.give(j, parameter, "weight", name)
            for name, buffer in part.layer.named_buffers():
                if name in part.stacked:
                    tensors.give(j, as_passed(buffer), "buffer", name, buffer.dtype)
                else:
                    tensors.inputs[j].append(tensors.share(buffer, "buffer", name))
            if real is not None:
                tensors.inputs[j].append(tensors.share(real, "tokens", None))
        shared = (*tensors.slots, *tensors.learned, *tensors.fixed, *(t for own in tensors.own for t in own))
        known_by = (
            [part.layer.training for part in self.parts],
            torch.is_grad_enabled(),
            side_outputs.wanted(),
            str([call.settings() for call in calls[: len(self.parts)]]),
            str(tensors.inputs),
            [(t.shape, t.dtype, t.requires_grad) for t in shared],
        )
        key = str(known_by)
        if key not in self.graphs:
            self.graphs[key] = self._trace(calls, tensors)
        traced = self.graphs[key]
        if any(stage.keyed for stage in traced):
            keys = randomness.active().layer_keys(self.first, self.size)
            for j, stage in enumerate(traced):
                if stage.keyed:
                    tensors.give(j, keys[j :: len(self.parts)] if self.count > 1 else keys[j], "key")
        known = self.loops.setdefault((key, *lowered_for()), {}) if self.count > 1 else None
        last, sides = run_stages([stage.stage for stage in traced], tensors, known)
        recorded = [tree_unflatten(side, stage.side_spec) for stage, side in zip(traced, sides, strict=True)]
        side_outputs.replay(recorded, self.count)
        output, stores = traced[-1].output(last, tensors.loop if self.count > 1 else None)
        for mapping, entries in zip(calls[-1].shared, stores, strict=True):
            mapping.update(entries)
        return output

    def _trace(self, calls: Sequence[Call], tensors: RunTensors) -> list[_TracedLayer]:
        traced, slots = [], [_computed(t) for t in tensors.slots]
        for j, part in enumerate(self.parts):
            outputs: list[int] | None = None  # all
            if self.size == 1 and part.shape is not None:
                leaves = [path for path in part.shape.leaves if path is not None]
                outputs = [number for number, path in enumerate(leaves) if path != UNUSED]
            elif self.size > 1:
                after = tensors.inputs[j + 1] if j + 1 < len(self.parts) else []
                outputs = sorted({i.index for i in after if i.source == "chain"}) if after else sorted({*tensors.loop})
            own = tensors.own[j]
            if self.count > 1:  # a turn's
                own = [torch.empty_like(t[0], requires_grad=t.requires_grad) for t in own]
            sources = {"slot": slots, "learned": tensors.learned, "fixed": tensors.fixed, "own": own}
            given = [
                _computed(calls[j].leaves[i.name]) if i.source == "chain" else sources[i.source][i.index]
                for i in tensors.inputs[j]
            ]
            layer = _TracedLayer(part, calls[j], tensors.inputs[j], outputs, self.size == 1)
            layer.trace(given, self.prepare, self.partition, self.first + j)
            traced.append(layer)
        return traced


class _TracedLayer:
    """A traced layer, of which the output tensors ``outputs`` are wanted (None: all)."""

    def __init__(
        self, part: LayerPart, call: Call, inputs: Sequence[Input], outputs: Sequence[int] | None, single: bool
    ) -> None:
        # a single one is a run by itself, and may store tensors for later layers
        self.part, self.inputs, self.outputs, self.single = part, list(inputs), outputs, single
        self.settings, self.call_spec = call.settings(), call.spec
        self.training = part.layer.training
        self.keyed = False  # whether it draws; then its last input is a key of random numbers
        self._leaves: list[Any] = []  # of the output: a number for each tensor, and other leaves as they are
        self._spec: Any = None  # of the output with stored entries
        self.side_spec: Any = None  # of side outputs

    def trace(self, given: Flat, prepare: Prepare, partition: Callable[..., Any], number: int) -> None:
        """Trace the decoder's layer ``number`` on tensors like those ``given``."""

        def graph(keys: Flat) -> LayerGraph:
            with scopes.tracing():
                return LayerGraph(lambda flat: self._function(flat, prepare), [*given, *keys], partition)

        inputs = [*self.inputs]
        try:
            made = graph([])
        except randomness.UnknownDraw:
            if randomness.active().key is None:
                raise
            self.keyed = True
            made = graph([randomness.active().layer_keys(number, 1)[0]])
            last_own = max((i.index for i in inputs if i.source == "own"), default=-1)
            inputs.append(Input("own", last_own + 1, "key"))
        assert self.outputs is not None
        self.stage = Stage(made, inputs, self.outputs)

    def output(self, last: Flat, loop: Sequence[int] | None) -> tuple[Any, list[dict[Any, Any]]]:
        """Return the layer's output, and the entries that it stores for later layers, from the tensors ``last``."""
        # only those around the ``loop``, if there is one; the others, which nobody uses, become NaN
        numbers = self.outputs if loop is None else loop
        assert numbers is not None
        found = dict(zip(numbers, last, strict=True))
        leaves = [
            found.get(leaf.number, _stand_in(last[0])) if isinstance(leaf, _Number) else leaf for leaf in self._leaves
        ]
        output: tuple[Any, list[dict[Any, Any]]] = tree_unflatten(leaves, self._spec)
        return output

    def _function(self, flat: Flat, prepare: Prepare) -> Flat:
        """The layer as a function of its inputs, to the wanted outputs, its stored entries, and side outputs."""
        given: dict[str, dict[Any, Tensor]] = {target: {} for target in ("leaf", "weight", "buffer", "tokens")}
        for i, t in zip(self.inputs, flat, strict=False):
            given[i.target][i.name] = as_given(t, i.dtype)
        leaves = [given["leaf"].get(at, setting) for at, setting in enumerate(self.settings)]
        args, kwargs = tree_unflatten(leaves, self.call_spec)
        shared = layer_inputs.shared_in(args, kwargs)
        before = [dict(mapping) for mapping in shared]
        with randomness.drawing(*flat[len(self.inputs) :]), side_outputs.given(given["tokens"].get(None)):
            prefix = f"{self.part.name}."
            named = prepare({prefix + key: weight for key, weight in given["weight"].items()})
            used = {name.removeprefix(prefix): t for name, t in named.items()} | given["buffer"]
            run = functools.partial(partial_gradients.functional_call, self.part.layer, used, args, kwargs)
            output, side = side_outputs.collect(run)
        stores = layer_inputs.stored(before, shared)
        for mapping, known in zip(shared, before, strict=True):
            mapping.data = known
        after = tree_flatten((args, kwargs))
        if [*map(id, after[0])] != [*map(id, leaves)] or (any(stores) and not self.single):
            raise LoopChanged(f"{self.part.name} changes an argument that it is given")
        found, self._spec = tree_flatten((output, stores))
        tensors = [t for t in found if isinstance(t, Tensor)]
        numbers = iter(range(len(tensors)))
        self._leaves = [_Number(next(numbers)) if isinstance(t, Tensor) else t for t in found]
        returned = len([t for t in tree_flatten(output)[0] if isinstance(t, Tensor)])
        wanted = range(returned) if self.outputs is None else self.outputs
        self.outputs = sorted({*wanted, *range(returned, len(tensors))})
        sides, self.side_spec = tree_flatten(side)
        return [*(tensors[k] for k in self.outputs), *sides]


@dataclass(frozen=True)
class _Number:
    number: int


def _computed(t: Tensor) -> Tensor:
    return t.detach().requires_grad_(t.is_floating_point())


def _stand_in(like: Tensor) -> Tensor:
    value = float("nan") if like.is_floating_point() else -1
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)
