"""The search for a job that fits, or fits more: neighbours of a job are compiled, and none is guessed."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from trainer.compile.job import CompileJob
from trainer.compile.report import CompileReport
from trainer.errors import UserError
from trainer.layout.mesh import Mesh
from trainer.report.lines import say, waiting
from trainer.report.units import size

# makes a neighbour, or raises the UserError that says why there is none
Neighbour = Callable[[], CompileJob]

_MOST_TRIES = 12  # batch sizes; each takes minutes
_REMAT = ("none", "save_matmuls", "full", "offload")


@dataclass(frozen=True)
class Tried:
    """A neighbour of a job, and what its compile found; ``refused`` says why it could not be compiled.

    Args:
        required_bytes: what its largest graph needs.
        wall_seconds: of all its graphs.
    """

    what: str
    fits: bool = False
    required_bytes: int | None = None
    cycles_per_token: float | None = None
    wall_seconds: float | None = None
    refused: str = ""

    @property
    def cells(self) -> tuple[str, ...]:
        """The row under :data:`trainer.compile.summary.TRIED_HEADER`."""
        return (
            self.what,
            "can't be" if self.refused else "yes" if self.fits else "no",
            size(self.required_bytes) if self.required_bytes is not None else "",
            f"{self.cycles_per_token:,.0f}" if self.cycles_per_token is not None else "",
            f"{self.wall_seconds:,.0f} s" if self.wall_seconds is not None else self.refused,
        )


def search(job: CompileJob, report: CompileReport, console: Console) -> tuple[list[Tried], int]:
    """Compile neighbours of ``job`` and print each result as it comes.

    If the job does not fit, other remat policies and meshes are tried at the same batch, and then smaller batches. If
    it fits, larger batches are tried.

    Returns:
        what was tried, and the largest batch that was seen to fit.
    """
    say(console, "\ntrying larger batches …" if report.fits else "\ntrying what else would fit …")
    tried: list[Tried] = []

    def attempt(what: str, neighbour: Neighbour) -> Tried:
        with waiting(console, f"compiling {what} …"):
            result = _try(what, neighbour)
        tried.append(result)
        name, fits, *rest = result.cells
        say(console, f"{name}: {'fits' if fits == 'yes' else fits}: " + ", ".join(filter(None, rest)))
        return result

    if not report.fits:
        remats = () if report.graphs[0].fits else _other_remats(job)  # which change the train step alone
        for what, neighbour in (*remats, *_other_meshes(job)):
            attempt(what, neighbour)
    limit = report.chip_hbm_bytes

    def needed(result: CompileReport | Tried) -> float | None:
        """Bytes that it requires. The compiler rounds them in its messages, so its verdict decides near the limit."""
        found = result.required_bytes if isinstance(result, Tried) else result.largest_graph.needed_bytes
        if found is None:
            return None
        return min(found, limit) if result.fits else max(found, limit + 1)

    most = largest_batch(
        report.argument_bytes,
        {job.job.args.per_device_train_batch_size: needed(report) or 0},
        limit,
        lambda rows: needed(attempt(f"{rows} rows a device", lambda: _with_batch(job, rows))),
    )
    say(
        console,
        f"the largest batch found to fit: {most} rows a device" if most else "no batch fits: one row is too much",
    )
    return tried, most


def _try(what: str, neighbour: Neighbour) -> Tried:
    try:
        other = neighbour()
        found = other.compile()
    except UserError as error:
        return Tried(what, refused=str(error.found))
    cycles = found.estimated_cycles / (other.job.tokens / other.job.plan.batch_shards) if found.fits else None
    seconds = sum(graph.wall_seconds for graph in found.graphs)
    return Tried(what, found.fits, found.largest_graph.needed_bytes, cycles, seconds)


def largest_batch(
    arguments: float, known: Mapping[int, float], limit: float, attempt: Callable[[int], float | None]
) -> int:
    """The largest batch a device that was seen to fit; 0: not even one row.

    Memory is close to linear in the batch, except near the limit, where the compiler spends time to save some. So the
    next batch to try is where a line through the known sizes meets the limit, or an eighth more as long as everything
    fits. After a try that left more than half of the open range, the next is the middle of what is left.

    Args:
        arguments: bytes that any batch requires.
        known: batch → bytes that it requires.
        limit: bytes there are.
        attempt: bytes that a batch requires, None if it can't be compiled.
    """
    sizes = {0: arguments, **known}
    middle = False
    for _ in range(_MOST_TRIES):
        low = max((batch for batch, needed in sizes.items() if needed <= limit), default=None)
        if low is None:  # the arguments alone are too large
            return 0
        high = min((batch for batch, needed in sizes.items() if needed > limit and batch > low), default=None)
        if high is not None and high - low == 1:
            break
        if high is None:
            line = (limit - arguments) / max(sizes[low] - arguments, 1) * low
            batch = max(math.floor(min(line, 8 * low)), low + -(-low // 8))
        elif middle:
            batch = (low + high) // 2
        else:
            line = low + (limit - sizes[low]) / (sizes[high] - sizes[low]) * (high - low)
            batch = min(max(math.floor(line), low + 1), high - 1)
        found = attempt(batch)
        sizes[batch] = math.inf if found is None else found
        left = batch - low if sizes[batch] > limit else math.inf if high is None else high - batch
        middle = high is not None and not middle and 2 * left > high - low
    return max(batch for batch, needed in sizes.items() if needed <= limit)


def _with_batch(job: CompileJob, batch: int) -> CompileJob:
    args = replace(job.job.args, per_device_train_batch_size=batch)
    return replace(job, job=replace(job.job, args=args))


def _with_recipe(job: CompileJob, **changes: Any) -> CompileJob:
    return replace(job, job=replace(job.job, recipe=replace(job.job.recipe, **changes)))


def _other_remats(job: CompileJob) -> Iterator[tuple[str, Neighbour]]:
    compute = job.job.recipe.compute
    for remat in _REMAT:
        if remat != compute.remat:
            changed = replace(compute, remat=remat)
            yield f"remat {remat}", functools.partial(_with_recipe, job, compute=changed)


def _other_meshes(job: CompileJob) -> Iterator[tuple[str, Neighbour]]:
    """Meshes with a factor of two moved from one axis to another, within a slice."""
    mesh = job.job.recipe.mesh
    sizes = mesh.ici_sizes(job.job.devices)
    for giver, taker in itertools.permutations(sizes, 2):
        if sizes[giver] % 2 == 0:
            moved = {**sizes, giver: sizes[giver] // 2, taker: sizes[taker] * 2}
            what = "mesh " + " × ".join(f"{axis}={n}" for axis, n in moved.items())
            yield what, functools.partial(_with_recipe, job, mesh=Mesh(dcn=mesh.dcn, **moved))
