"""CompileGuard: a step that would compile again stops the run, and the error names what changed."""

import contextlib
from collections import Counter

from shardwright.errors import UserError, building_a_graph
from shardwright.hosts.hosts import hosts
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.step.graph_difference import Trace, first_difference, graph_text
from shardwright.xla.runtime import compile_count, program_count, run_now

COMPILED: Counter[str] = Counter()  # step → times that this run has compiled it, loaded ones left out
_before = 0  # programs that the process had compiled when the run began


def begin_run() -> None:
    """Count the compiles of a run from now on: a notebook's process has several."""
    global _before
    COMPILED.clear()
    _before = compile_count()


def compiles_said() -> str:
    """The programs that this run has compiled: each step by its name, and the number of all other graphs."""
    steps = [f"{what} {count}" for what, count in COMPILED.items() if count]
    others = compile_count() - _before - COMPILED.total()
    return f"{', '.join(steps) or 'no step'}; {others} small graphs around them (weights, metrics)"


class CompileGuard:
    """Runs a step that may compile ``expected`` times, and stops the run at one more: it says what changed."""

    def __init__(self, what: str, expected: int) -> None:
        self.what, self.expected = what, expected
        self.compiles, self.first = 0, True
        self._signature: dict[str, str] = {}
        self._graph = b""  # of the first step

    def run(self, batch: Tensors, trace: Trace) -> Tensors:
        """Run the graph that ``trace`` builds of ``batch``; returns its results, as ``trace`` does.

        Raises UserError if the batch is unlike the first in names, shapes or dtypes, or it compiled again all the same.
        """
        with hosts().watchdog.compiling() if self.first else contextlib.nullcontext():
            self._compare(batch)
            before, compiled = program_count(), compile_count()
            with building_a_graph() if self.first else contextlib.nullcontext():
                results = trace(batch)
            if self.first:
                self._graph = graph_text(results)
            run_now(list(results.values()))
        self.compiles += program_count() - before
        COMPILED[self.what] += compile_count() - compiled
        self.first = False
        if self.compiles > self.expected:
            inputs = "; ".join(f"{name}: {text}" for name, text in self._signature.items())
            change = first_difference(self._graph, results, lambda: trace(batch))
            raise UserError(
                asked=f"{self.expected} compile of the {self.what} in this run",
                found=f"{self.compiles} compiles, though every input kept its shape and dtype: {inputs}",
                why="something else in the traced graph changed between two steps, such as a number in its code: "
                + change,
                instead="make what changes a tensor input of the model, or constant",
            )
        return results

    def _compare(self, batch: Tensors) -> None:
        signature = {name: f"shape {list(t.shape)}, {t.dtype}" for name, t in batch.items()}
        if self.first:
            self._signature = signature
        for name in sorted(signature.keys() | self._signature.keys()):
            now, then = signature.get(name, "absent"), self._signature.get(name, "absent")
            if now != then:
                raise UserError(
                    asked=f"the {self.what} on a batch whose {name!r} is: {now}",
                    found=f"the step was compiled for {name!r} being: {then}",
                    why="a changed input compiles the whole step again, minutes on a pod, at every change",
                    instead="the same shapes and dtypes in every batch: drop or pad the last, pack to sequence_length",
                )
