"""What would fit, or fit more: neighbours of a job, each compiled, none guessed."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.table import Table

from trainer.arguments import TrainingArguments
from trainer.chips import find_topology
from trainer.compile_job import CompileArguments
from trainer.compile_page import size
from trainer.compile_report import CompileReport
from trainer.errors import UserError
from trainer.lowering import lower
from trainer.model import experts_modules, load_config, meta_model, training_flops
from trainer.plan import make_plan
from trainer.recipe import Mesh, Recipe
from trainer.tpu_compile import compile_for

_MOST_TRIES = 12  # of batch sizes: minutes each
_REMAT = ("none", "save_matmuls", "full", "offload")


@dataclass(frozen=True)
class Job:
    """A step to compile: recipe, options, and where."""

    recipe: Recipe
    args: TrainingArguments
    options: CompileArguments

    @classmethod
    def of(cls, args: TrainingArguments, options: CompileArguments) -> Job:
        from trainer.job import effective_recipe

        return cls(effective_recipe(args), args, options)

    @property
    def title(self) -> str:
        return (
            f"{self.recipe.name}, {self.args.model or 'its own model'}: {self.args.per_device_train_batch_size} × "
            f"{self.args.sequence_length} tokens a device"
        )

    def compile(self) -> CompileReport:
        """Lower and compile it, or take the cached result.

        Raises:
            UserError: whatever a run would refuse; no libtpu; a compiler that failed.
        """
        options, args = self.options, self.args
        where = find_topology(str(options.topology), options.slices)
        config = load_config(args.model, self.recipe)
        model = meta_model(config)
        plan = make_plan(self.recipe, model, where.devices, **args.state_dtypes)
        rows = args.per_device_train_batch_size * plan.batch_shards * args.gradient_accumulation_steps
        crossed = [axis for name in experts_modules(model)[:1] for axis in plan[f"{name}.down_proj"].axes_of(0)]
        dcn = self.recipe.mesh.dcn_sizes()
        return compile_for(
            lower(self.recipe, args, config, plan),
            where.name,
            slices=options.slices,
            dcn=dcn if math.prod(dcn.values()) > 1 else None,
            flags=_compiler_options(options.compiler_options),
            timeout=options.compile_timeout,
            model_flops=training_flops(model, config, rows, args.sequence_length),
            exchange=crossed[0] if crossed else None,
        )


def _compiler_options(text: str) -> dict[str, str]:
    flags = {}
    for word in text.split():
        name, equals, value = word.lstrip("-").partition("=")
        if not (name and equals):
            raise UserError(
                asked=f"--compiler_options {text!r}",
                found=f"{word!r}",
                why="each is a name and a value",
                instead="name=value, such as xla_tpu_scoped_vmem_limit_kib=65536",
            )
        flags[name] = value
    return flags


def search(job: Job, report: CompileReport, console: Console) -> None:
    """Print, as they come, neighbours of ``job`` and whether they fit.

    A job that does not fit: its remat policies and its meshes at the same batch, then smaller batches. One that does:
    larger batches.
    """
    table = Table("tried", "fits", "HBM a chip", "cycles a token", "compile", box=None, pad_edge=False)
    console.print("\ntrying what else would fit …" if not report.fits else "\ntrying larger batches …")
    tried: dict[str, CompileReport] = {}

    def attempt(what: str, other: Job) -> bool:
        with console.status(f"compiling {what} …"):
            try:
                found = other.compile()
            except UserError as error:
                table.add_row(what, "can't be", str(error.found), "", "")
                return False
        tried[what] = found
        batch = other.args.per_device_train_batch_size * other.args.sequence_length
        table.add_row(
            what,
            "yes" if found.fits else "no",
            size(found.required_bytes),
            f"{found.estimated_cycles / batch / other.args.gradient_accumulation_steps:,.0f}" if found.fits else "",
            f"{found.wall_seconds:.0f} s",
        )
        return found.fits

    if not report.fits:
        for what, other in (*_other_remats(job), *_other_meshes(job)):
            attempt(what, other)
    most = largest_batch(job, report.fits, lambda b: attempt(f"{b} rows a device", _with_batch(job, b)))
    console.print(table)
    console.print(
        f"the largest batch found to fit: {most} rows a device" if most else "no batch fits: one row is too much",
        highlight=False,
    )


def largest_batch(job: Job, fits: bool, attempt: Callable[[int], bool]) -> int:
    """The largest batch a device that was seen to fit, by doubling or halving and then bisection; 0: not even one."""
    batch = job.args.per_device_train_batch_size
    low, high = (batch, math.inf) if fits else (0, batch)
    for _ in range(_MOST_TRIES):
        middle = low * 2 if high == math.inf else (low + int(high)) // 2
        if middle in (low, high):
            break
        if attempt(int(middle)):
            low = int(middle)
        else:
            high = middle
    return low


def _with_batch(job: Job, batch: int) -> Job:
    return replace(job, args=replace(job.args, per_device_train_batch_size=batch))


def _other_remats(job: Job) -> Iterator[tuple[str, Job]]:
    for remat in _REMAT:
        if remat != job.recipe.compute.remat:
            recipe = replace(job.recipe, compute=replace(job.recipe.compute, remat=remat))
            yield f"remat {remat}", replace(job, recipe=recipe)


def _other_meshes(job: Job) -> Iterator[tuple[str, Job]]:
    """A factor of two moved from one axis to another, within a slice."""
    mesh = job.recipe.mesh
    sizes = mesh.ici_sizes(find_topology(str(job.options.topology), job.options.slices).devices)
    for giver, taker in itertools.permutations(sizes, 2):
        if sizes[giver] % 2 == 0:
            moved = {**sizes, giver: sizes[giver] // 2, taker: sizes[taker] * 2}
            recipe = replace(job.recipe, mesh=Mesh(dcn=mesh.dcn, **moved))
            yield "mesh " + " × ".join(f"{axis}={n}" for axis, n in moved.items()), replace(job, recipe=recipe)
