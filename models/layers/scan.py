"""The forward and backward of a run of layers, as a `scan` over its periods if there is more than one.

A turn runs the graphs of the period's layers (:mod:`shardwright.models.layers.graph`) in order, and a turn of the
backward runs their backward graphs in reverse. So remat works a layer at a time, whatever the period.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor

# semi-private: torch/utils/_pytree.py, torch 2.9
from torch.utils._pytree import tree_flatten, tree_unflatten

from shardwright.models.layers.graph import Flat, LayerGraph
from shardwright.models.layers.layer_inputs import Input, RunTensors
from shardwright.models.ops.while_loop import Known, Step, run_turns

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class Stage:
    """One layer of a run's period."""

    graph: LayerGraph
    inputs: Sequence[Input]  # of its graph
    outputs: Sequence[int]  # the numbers of the layer's output tensors that the graph returns, before side outputs


def run_stages(stages: Sequence[Stage], tensors: RunTensors, known: Known | None) -> tuple[Flat, list[Flat]]:
    """Run the period's ``stages`` on ``tensors``: scanned, if ``known``, a cache of these stages' loops, is given.

    Return the last layer's outputs (if scanned, those that go around the loop), and each layer's side outputs.
    """
    program = _Program(stages, tensors, known)
    flat, program.given = tree_flatten((tensors.slots, tensors.learned, tensors.fixed, tensors.own))
    last, sides = tree_unflatten(_Run.apply(program, *flat), program.results)
    return last, sides


class _Program:
    """The forward and backward of one turn, and the specs of its tensors and of its results."""

    given: Any
    results: Any

    def __init__(self, stages: Sequence[Stage], tensors: RunTensors, known: Known | None) -> None:
        self.stages, self.known, self.slots = stages, known, len(tensors.slots)
        self.scanned = known is not None
        self.last = tuple(tensors.loop) if self.scanned else stages[-1].outputs  # numbers of the returned tensors

    def forward(self, slots: Flat, learned: Flat, fixed: Flat, own: list[Flat]) -> tuple[Flat, list[Flat], list[Flat]]:
        """Run one turn: return the last layer's outputs, and each stage's side outputs and kept tensors."""
        sides, kept = [], []
        chain: dict[int, Tensor] = {}
        for stage, mine in zip(self.stages, own, strict=True):
            sources: Any = {"slot": slots, "chain": chain, "learned": learned, "fixed": fixed, "own": mine}
            results, saved = stage.graph.forward([sources[i.source][i.index] for i in stage.inputs])
            chain = dict(zip(stage.outputs, results, strict=False))
            sides.append(results[len(stage.outputs) :])
            kept.append([t for at, t in enumerate(saved) if self._given_again(stage, at) is None])
        return [chain[k] for k in self.last], sides, kept

    def backward(
        self,
        last: Gradients,
        of_learned: Gradients,
        of_sides: Sequence[Sequence[Any]],
        learned: Flat,
        fixed: Flat,
        own: list[Flat],
        kept: list[Flat],
    ) -> tuple[Gradients, Gradients, list[Gradients]]:
        """Run one turn: return the gradients of the slots, of ``learned``, and of each stage's own.

        ``last`` and ``of_sides`` are the gradients of what :meth:`forward` returns, ``of_learned`` those so far.
        """
        of_chain: dict[int, Tensor | None] = {}
        for k, gradient in zip(self.last, last, strict=True):
            of_chain[k] = _sum(of_chain.get(k), gradient)
        of_own: list[Gradients] = [[None] * len(mine) for mine in own]
        of_slots: Gradients = [None] * self.slots
        of_learned = list(of_learned)
        for j in reversed(range(len(self.stages))):
            stage = self.stages[j]
            sources = {"learned": learned, "fixed": fixed, "own": own[j]}
            mine = iter(kept[j])
            saved = [
                next(mine) if (again := self._given_again(stage, at)) is None else sources[again.source][again.index]
                for at in range(stage.graph.saved)
            ]
            ends = [*(of_chain.get(k) for k in stage.outputs), *of_sides[j]]
            wanted = [g for g, has in zip(ends, stage.graph.differentiable, strict=True) if has and g is not None]
            if len(self.stages) > 1 or not self.scanned:
                saved, wanted = _barrier(saved, wanted)
            found = stage.graph.backward(saved, wanted)
            of_chain = {}
            for i, gradient in zip(stage.inputs, found, strict=True):
                targets: Any = {"slot": of_slots, "chain": of_chain, "learned": of_learned, "own": of_own[j]}
                if gradient is not None and i.source != "fixed":
                    target = targets[i.source]
                    before = target.get(i.index) if i.source == "chain" else target[i.index]
                    target[i.index] = _sum(before, gradient)
        return of_slots, of_learned, of_own

    def turns(self, turn: Step, carry: Any, xs: Any, *, reverse: bool = False) -> tuple[Any, Any]:
        """Run all turns, or the only one."""
        with torch.no_grad():
            if self.known is None:
                return turn(carry, xs)
            return run_turns(turn, carry, xs, reverse=reverse, known=self.known)

    def _given_again(self, stage: Stage, at: int) -> Input | None:
        """The input that the saved tensor ``at`` is, if the backward has it too: not the output of a layer."""
        known = stage.inputs[stage.graph.aliases[at]] if at in stage.graph.aliases else None
        return None if known is None or known.source in ("slot", "chain") else known


class _Run(torch.autograd.Function):
    # torch_xla's own `Scan` needs jax, to lay gradients out as the parameters are; here `prepare` has done so already
    @staticmethod
    def forward(ctx, program: _Program, *flat: Tensor):  # type: ignore[override]
        slots, learned, fixed, own = given = tree_unflatten(flat, program.given)

        def turn(carry: Any, x: list[Flat]) -> tuple[Any, Any]:
            slots, learned, fixed = carry
            last, sides, kept = program.forward(slots, learned, fixed, x)
            return (last, learned, fixed), (sides, kept)

        (last, _, _), (sides, kept) = program.turns(turn, (slots, learned, fixed), own)
        ctx.program = program
        saved, ctx.saved = tree_flatten((given, kept))
        ctx.save_for_backward(*saved)
        results, program.results = tree_flatten((last, sides))
        return tuple(results)

    @staticmethod
    def backward(ctx, *gradients):  # type: ignore[override]
        program: _Program = ctx.program
        (slots, learned, fixed, own), kept = tree_unflatten(ctx.saved_tensors, ctx.saved)
        last, sides = tree_unflatten(gradients, program.results)
        of_learned: Gradients = [None] * len(learned)
        if program.scanned:
            last = [g if t.is_floating_point() else None for g, t in zip(last, slots, strict=True)]
            of_learned = [torch.zeros_like(t) if t.is_floating_point() else None for t in learned]

        def turn(carry: Any, x: Any) -> tuple[Any, Any]:
            (of_last, of_learned, learned, fixed), (of_sides, own, kept) = carry, x
            of_slots, of_learned, of_own = program.backward(of_last, of_learned, of_sides, learned, fixed, own, kept)
            if program.scanned:
                pairs = zip(of_last, of_slots, strict=True)
                of_slots = [torch.zeros_like(g) if new is None and g is not None else new for g, new in pairs]
            return (of_slots, of_learned, learned, fixed), of_own

        carry, xs = (last, of_learned, learned, fixed), (sides, own, kept)
        (of_slots, of_learned, _, _), of_own = program.turns(turn, carry, xs, reverse=True)
        return None, *tree_flatten((of_slots, of_learned, [None] * len(fixed), of_own))[0]


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _barrier(saved: Flat, gradients: Flat) -> tuple[Flat, Flat]:
    """Copies of the tensors behind a barrier."""
    # Without it the compiler would merge the backward's recomputation with the forward, and undo remat; and it might
    # recompute several layers before the first one's gradients are there, and hold all of it.
    copies = [t.clone() for t in (*saved, *gradients)]
    xm.optimization_barrier_(copies)
    return copies[: len(saved)], copies[len(saved) :]
