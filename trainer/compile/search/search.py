"""The search for a job that fits, or fits more, by compiling its neighbours."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from rich.console import Console

from shardwright.compile.compile_job import CompileJob
from shardwright.compile.report.estimate import Ends, ranged
from shardwright.compile.report.report import CompileReport
from shardwright.compile.search.largest_that_fits import largest_batch
from shardwright.compile.search.remat_share import compile_auto
from shardwright.errors import TransientError, UserError
from shardwright.files.cache import CacheRefusal
from shardwright.report.lines import say, waiting
from shardwright.report.units import mesh_text, size
from shardwright.step.auto_remat import AUTO, is_auto

Neighbour = Callable[[], CompileJob]  # makes a neighbour, or raises UserError

_REMAT = ("none", "save_matmuls", AUTO, "full", "offload")


@dataclass(frozen=True)
class Trial:
    """The result of compiling a neighbour of a job; speeds are estimates for one chip."""

    what: str  # the neighbour, for messages
    fits: bool = False
    required_bytes: int | None = None  # of its largest graph
    tokens_per_second: float | None = None
    mfu: float | None = None
    wall_seconds: float | None = None  # to compile all its graphs
    refused: str = ""  # why it could not be compiled; empty if it could
    rates: Ends | None = None  # tokens/s at the ends of the estimate's range

    def __str__(self) -> str:
        if self.refused:
            return f"can't be: {self.refused}"
        words = ["fits" if self.fits else "does not fit", size(self.required_bytes or 0)]
        if self.fits and self._speed:
            words.append(f"{self._speed} tokens/s a chip")
        if self.fits and self.mfu is not None:
            words.append(f"{self.mfu:.1%} MFU (estimate)")
        return ", ".join(words)

    @classmethod
    def of(cls, what: str, report: CompileReport, room: float = 1.0) -> Trial:
        """The trial that ``report`` is of; it fits if it takes at most the part ``room`` of the HBM."""
        needed, estimate = report.largest_graph.needed_bytes, report.estimate
        fits = report.fits and needed <= room * report.chip_hbm_bytes
        seconds = sum(graph.wall_seconds for graph in report.graphs)
        return cls(what, fits, needed, estimate.tokens_per_second, estimate.mfu, seconds, rates=estimate.rates())

    @property
    def rank(self) -> tuple[bool, bool, float]:
        """Sort key, greater is better: those that fit by their speed, others by how little memory they need."""
        speed, needed = self.tokens_per_second or 0.0, self.required_bytes or 0
        return not self.refused, self.fits, speed if self.fits else -needed

    @property
    def _speed(self) -> str:
        return "" if self.tokens_per_second is None else ranged(self.tokens_per_second, self.rates)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row under :data:`shardwright.compile.report.summary.TRIED_HEADER`."""
        fits = "yes" if self.fits else "no"
        needed = size(self.required_bytes) if self.required_bytes is not None else ""
        mfu = f"{self.mfu:.1%}" if self.mfu is not None else ""
        took = f"{self.wall_seconds:,.0f} s" if self.wall_seconds is not None else self.refused
        return (self.what, "can't be" if self.refused else fits, needed, self._speed, mfu, took)


def search(job: CompileJob, report: CompileReport, console: Console, tried: list[Trial], auto: bool = False) -> int:
    """Compile neighbours of ``job``, print each result and the fastest; returns the largest batch that fits.

    If the job does not fit, it tries other remat policies and meshes at the same batch, and then smaller batches; if it
    fits, remat ``auto`` and larger batches, with full remat if that of the job was chosen for its batch (``auto``).
    Fills ``tried`` with the job and its neighbours, the fastest first, also if Ctrl-C or SIGTERM stops it.
    """
    tried.append(Trial.of("as asked", report))
    try:
        return _search(job, report, console, tried, auto)
    except KeyboardInterrupt:
        say(console, f"search:  stopped after {len(tried)} settings; the same command goes on")
        raise
    finally:
        tried.sort(key=lambda result: result.rank, reverse=True)
        if tried[0].fits:
            say(console, f"the fastest found: {tried[0].what}: {tried[0]}")


def _search(job: CompileJob, report: CompileReport, console: Console, tried: list[Trial], auto: bool) -> int:
    say(console, "\ntrying larger batches …" if report.fits else "\ntrying what else would fit …")

    def attempt(what: str, neighbour: Neighbour) -> Trial:
        with waiting(console, f"compiling {what} …"):
            result = _try(what, neighbour, console)
        tried.append(result)
        say(console, f"{result.what}: {result}")
        return result

    known, policy = tried[0], job.job.recipe.compute.remat
    if not report.fits:
        # remat changes only the train step
        for remat in () if report.graphs[0].fits else _REMAT:
            if remat != policy:
                attempt(f"remat {remat}", functools.partial(job.with_remat, remat))
        for sizes in moved_meshes(job.job.recipe.mesh.ici_sizes(job.job.devices)):
            attempt(f"mesh {mesh_text(sizes)}", functools.partial(job.with_mesh, sizes))
    elif auto:
        job = job.with_remat("full")
        known = attempt("remat full", lambda: job)
    elif policy in ("full", "offload"):
        attempt("remat auto", functools.partial(job.with_remat, AUTO))
    limit = report.chip_hbm_bytes

    def needed(result: Trial) -> float | None:
        """Required bytes, adjusted to the compiler's verdict, since its messages round them."""
        if result.required_bytes is None:
            return None
        return min(result.required_bytes, limit) if result.fits else max(result.required_bytes, limit + 1)

    most = largest_batch(
        report.argument_bytes,
        {job.job.args.per_device_train_batch_size: needed(known) or 0},
        limit,
        lambda rows: needed(attempt(f"{rows} rows a device", functools.partial(job.with_batch, rows))),
    )
    found = f"the largest batch found to fit: {most} rows a device"
    say(console, found if most else "no batch fits: one row is too much")
    return most


def _try(what: str, neighbour: Neighbour, console: Console) -> Trial:
    try:
        other = neighbour()
        if is_auto(other.job):
            other, report = compile_auto(other, console)
            return Trial.of(f"{what}, which is {other.job.recipe.compute.remat:g}", report)
        return Trial.of(what, other.compile())
    except (CacheRefusal, TransientError):  # it says nothing of the setting
        raise
    except UserError as error:
        return Trial(what, refused=str(error.found))


def moved_meshes(sizes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Meshes with a factor of two moved between two axes within a slice."""
    for giver, taker in itertools.permutations(sizes, 2):
        if sizes[giver] % 2 == 0:
            yield {**sizes, giver: sizes[giver] // 2, taker: sizes[taker] * 2}
