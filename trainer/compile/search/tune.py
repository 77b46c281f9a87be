"""The search for the fastest recipe, mesh, batch and remat of a job on a slice, by the estimate of each step.

It is a hill climb from each recipe that takes the model, the fastest first: the first faster neighbour of a recipe's
best setting becomes its best. Each setting takes minutes to compile, so results are cached, and the same command goes
on where it was stopped.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import time
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass, replace

from rich.console import Console

from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.compile_job import CompileJob
from shardwright.compile.libtpu import CompilerKilled
from shardwright.compile.report.estimate import overlap
from shardwright.compile.search.remat_share import MARGIN
from shardwright.compile.search.search import Trial, moved_meshes
from shardwright.errors import TransientError, UserError, command
from shardwright.files.cache import CacheRefusal, cache_root, digest
from shardwright.files.folder import Folder
from shardwright.hosts.versions import code_digest
from shardwright.layout.load_recipe import shipped_recipes
from shardwright.layout.mesh import mesh_factors
from shardwright.report.lines import say, waiting
from shardwright.report.units import mesh_text, size
from shardwright.xla.libtpu_library import find_library

_SHOWN = 4  # settings that the estimate can't tell from the fastest
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)  # values of remat


@dataclass(frozen=True)
class Setting:
    """One way to run the job."""

    recipe: str
    mesh: tuple[tuple[str, int], ...]  # (axis, size) of all axes within a slice, in mesh order
    batch: int  # rows a device
    remat: float  # kept share of the layers' values

    def __str__(self) -> str:
        rows = "1 row" if self.batch == 1 else f"{self.batch} rows"
        return f"{self.recipe}, {mesh_text(dict(self.mesh))}, {rows} a device, remat {self.remat:g}"

    def of(self, args: TrainingArguments) -> TrainingArguments:
        mesh = mesh_factors(dict(self.mesh))
        compute = ",".join(filter(None, [args.compute, f"remat={self.remat:g}"]))  # the later one wins
        return replace(args, recipe=self.recipe, mesh=mesh, compute=compute, per_device_train_batch_size=self.batch)

    def neighbours(self) -> Iterator[Setting]:
        """The settings that differ in one thing or trade rows for kept values, the most promising first."""
        yield replace(self, batch=2 * self.batch)
        at = SHARES.index(self.remat)
        if at + 1 < len(SHARES):
            yield replace(self, remat=SHARES[at + 1])
        for sizes in moved_meshes(dict(self.mesh)):
            yield replace(self, mesh=tuple(sizes.items()))
        if self.batch > 1:
            yield replace(self, batch=self.batch // 2, remat=SHARES[-1])
            yield replace(self, batch=self.batch // 2)
        if at:
            yield replace(self, batch=2 * self.batch, remat=SHARES[0])
            yield replace(self, remat=SHARES[at - 1])


def _text(trial: Trial) -> str:
    if trial.fits or trial.refused:
        return str(trial).removeprefix("fits, ")
    return f"{size(trial.required_bytes or 0)}, does not fit with room to spare"


class Tuning:
    """The settings tried, also kept in a cache file. To fit is to leave room to spare (`remat_share.MARGIN`)."""

    def __init__(self, args: TrainingArguments, options: CompileArguments, console: Console) -> None:
        self.args, self.options, self.console = args, replace(options, only_train_step=True), console
        self.cut_short = False  # a setting was not tried for lack of time
        self._until = time.monotonic() + 60 * options.tune
        unasked = dict.fromkeys(("output_dir", "json", "report", "tune"))
        asked = {**args.as_dict(), **asdict(self.options), **unasked}
        # what files of these names hold, and the compiler
        job, library = CompileJob.of(args, self.options).job, find_library(options.libtpu)
        held = [job.recipe.as_dict(), job.config.to_dict(), library.version, os.environ.get("LIBTPU_INIT_ARGS")]
        held += [job.adapter_held] if job.adapter_held else []
        key = digest([json.dumps([asked, held], default=str), code_digest()])
        self.path = cache_root() / "tuned" / f"{key}.json"
        self.tried: dict[Setting, Trial] = {}
        self._untold: set[Setting] = set()  # those whose compiler was killed: tried once, and not kept
        # there is none, or none that can be read
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            self.tried = {
                Setting(**{**setting, "mesh": tuple((axis, n) for axis, n in setting["mesh"])}): Trial(**trial)
                for setting, trial in json.loads(self.path.read_text())
            }
        if self.tried:
            say(console, f"tune:    {len(self.tried)} settings were tried before")

    def best(self) -> Setting | None:
        """The fastest setting that fits, found in time; None: none fits."""
        for setting in self._starts():
            self.attempt(setting)
        while (best := self._climb()) is not None:
            if not self.tried[best].fits:
                return None
            whole = self._compile(best, replace(self.options, only_train_step=False))
            if whole.fits:
                return best
            self.tried[best] = replace(whole, refused="another graph of the run does not fit")
            self._write()
        return None

    def _climb(self) -> Setting | None:
        """The fastest of all recipes' settings, once no recipe's best has a faster neighbour."""
        done: set[str] = set()
        while (best := self.first(done)) is not None:
            rank = self.tried[best].rank
            if not any(self.attempt(setting).rank > rank for setting in best.neighbours() if self._worth(setting)):
                done.add(best.recipe)
        return self.first()

    def first(self, without: Container[str] = ()) -> Setting | None:
        """The fastest setting tried of recipes not in ``without``; if none fits, the nearest to fitting."""
        settings = (setting for setting in self.tried if setting.recipe not in without)
        return max(settings, key=lambda setting: self.tried[setting].rank, default=None)

    def untold(self, best: Setting) -> list[Setting]:
        """The settings that fit and whose range of speed overlaps that of ``best``, the fastest first."""
        ends = self.tried[best].rates
        found = {setting: trial.rates for setting, trial in self.tried.items() if trial.fits and setting != best}
        near = [setting for setting, rates in found.items() if ends and rates and overlap(ends, rates)]
        return sorted(near, key=lambda setting: self.tried[setting].rank, reverse=True)

    def _starts(self) -> Iterator[Setting]:
        """The job's own recipe and all others that take its model, each with its own mesh."""
        others = shipped_recipes() if self.args.model else ()  # else the model is the recipe's own
        for name in dict.fromkeys([str(self.args.recipe), *others]):
            mesh = self.args.mesh if name == self.args.recipe else None
            try:
                job = CompileJob.of(replace(self.args, recipe=name, mesh=mesh), self.options).job
            except UserError as error:
                if name == self.args.recipe:
                    raise
                say(self.console, f"tune:    {name} does not take this model: {str(error.found).splitlines()[0]:.120}")
                continue
            sizes = job.recipe.mesh.ici_sizes(job.devices)
            yield Setting(name, tuple(sizes.items()), self.args.per_device_train_batch_size, 0.0)

    def _worth(self, setting: Setting) -> bool:
        """Whether ``setting`` may fit: no smaller one of the same recipe and mesh failed to."""
        return not any(
            (other.recipe, other.mesh) == (setting.recipe, setting.mesh)
            and other.batch <= setting.batch
            and other.remat <= setting.remat
            and other != setting
            for other, found in self.tried.items()
            if not found.fits
        )

    def attempt(self, setting: Setting) -> Trial:
        """The trial of ``setting``, compiled unless it was tried; refused if no time is left."""
        if setting not in self.tried:
            if time.monotonic() > self._until:
                self.cut_short = True
                return Trial(str(setting), refused="no time")
            with waiting(self.console, f"compiling {setting} …"):
                self.tried[setting] = self._compile(setting, self.options)
            say(self.console, f"tune:    {setting}: {_text(self.tried[setting])}")
            self._write()
        return self.tried[setting]

    def _compile(self, setting: Setting, options: CompileArguments) -> Trial:
        try:
            report = CompileJob.of(setting.of(self.args), options).compile()
        except (CacheRefusal, TransientError):  # it says nothing of the setting
            raise
        except UserError as error:
            if isinstance(error, CompilerKilled):
                self._untold.add(setting)
            return Trial(str(setting), refused=str(error.found).splitlines()[0])
        return Trial.of(str(setting), report, MARGIN)

    def _write(self) -> None:
        content = [
            [asdict(setting), asdict(trial)] for setting, trial in self.tried.items() if setting not in self._untold
        ]
        Folder(self.path.parent).write(self.path.name, json.dumps(content).encode())


def tune(args: TrainingArguments, options: CompileArguments, console: Console) -> tuple[CompileJob, list[Trial]]:
    """The job of ``args`` in the fastest setting found, and all trials, the fastest first; prints how to run it.

    Raises UserError as :meth:`CompileJob.of`, and if no setting fits.
    """
    tuning = Tuning(args, options, console)
    try:
        best = tuning.best()
    except KeyboardInterrupt:
        say(console, f"tune:    stopped after {len(tuning.tried)} settings; the same command goes on")
        if (so_far := tuning.first()) is not None and tuning.tried[so_far].fits:
            say(console, f"tune:    the fastest so far: {so_far}: {_text(tuning.tried[so_far])}")
        raise
    if best is None:
        least = tuning.first()
        raise UserError(
            asked=f"--tune {options.tune}",
            found="no setting that fits" + (f"; nearest is {least}: {_text(tuning.tried[least])}" if least else ""),
            why=f"{len(tuning.tried)} were tried on {options.topology}",
            instead="a larger --topology, shorter rows, more time, or --optimizer_dtype bfloat16",
        )
    if tuning.cut_short:
        say(console, f"tune:    the time of --tune {options.tune} is over; the same command tries more")
    found = best.of(args)
    say(console, f"tune:    of {len(tuning.tried)} settings the fastest takes {_text(tuning.tried[best])}")
    if near := tuning.untold(best):
        names = "; ".join(map(str, near[:_SHOWN])) + (f"; and {len(near) - _SHOWN} more" if near[_SHOWN:] else "")
        say(console, f"tune:    the estimate can't tell it from {len(near)} others, whose ranges overlap: {names}")
    say(console, f"tune:    {command('train')} {shlex.join(options_of(found))}")
    return CompileJob.of(found, options), sorted(tuning.tried.values(), key=lambda trial: trial.rank, reverse=True)


def options_of(args: TrainingArguments) -> list[str]:
    """The options of the command line of ``args``: the recipe, and all that differ from the defaults."""
    plain, words = TrainingArguments(recipe=args.recipe).as_dict(), ["--recipe", str(args.recipe)]
    for name, value in args.as_dict().items():
        if value != plain[name]:
            words += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return words
