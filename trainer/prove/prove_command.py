"""The command behind `scripts/prove.py`: proves a run's recipe on a small model, and leaves a certificate."""

import datetime
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.mixture import shapes_of
from shardwright.files.cache import cache_root
from shardwright.hosts.versions import versions
from shardwright.job import Job
from shardwright.prove import certificate, layouts
from shardwright.prove.batches import make_batches
from shardwright.prove.plain import plain_model
from shardwright.prove.reference_optimizers import without_bfloat16
from shardwright.prove.sharded import run_sharded
from shardwright.prove.small_job import STEPS, SmallJob, check_provable, in_bfloat16, small_job
from shardwright.prove.trajectory import COARSE, Difference, Trajectory, differences, judged
from shardwright.report.lines import say, waiting
from shardwright.report.proof_report import print_proof, proof_page
from shardwright.report.units import mesh_text
from shardwright.xla.runtime import init_runtime

NOT_PROVED = 3  # the exit code


def prove(args: TrainingArguments, devices: int, console: Console, dump: Path | None = None) -> int:
    """Prove the run that ``args`` describe on ``devices`` devices; returns the exit code.

    ``dump`` is the folder to which XLA writes its programs, if it was told to. Raises UserError for what can't be.
    """
    started = time.monotonic()
    check_provable(args)
    cache_root()  # the certificate is written after minutes
    run = run_job(args, devices)
    small = small_job(run)
    say(
        console,
        f"model:   {type(run.model).__name__}, {run.facts.parameters:,} parameters; "
        f"shrunk to {small.job.facts.parameters:,} in {small.job.config.num_hidden_layers} layers",
    )
    meshes = dict.fromkeys(mesh_text(job.plan.mesh) for job in (run, small.job))
    say(console, f"mesh:    {' shrunk to '.join(meshes)}")
    prepare_devices(small.job.devices)
    found = compare(small, console)
    notes = list(layouts.plan_findings(run.plan))
    collectives: list[tuple[str, str, str, int, int]] = []
    if dump is not None and (program := layouts.step_program(dump)) is not None:
        collectives = layouts.collectives(program, small.job.plan.mesh)
        notes += layouts.summed_twice(program, small.job.plan.mesh)
    return certify(small, found, notes, collectives, time.monotonic() - started, console)


def run_job(args: TrainingArguments, devices: int) -> Job:
    """The job of the run that is proved; raises as :func:`prove`."""
    if args.dataset is None:  # the proof's tokens are random, so an objective on other records needs none either
        shapes = [shape for shape in args.reads if shape.is_text] or args.reads
    else:
        shapes = shapes_of(args.dataset, args.reads)
    return Job.resolve(args, lambda: devices).for_records(shapes)


def certify(
    small: SmallJob,
    found: Sequence[Difference],
    notes: Sequence[str],
    collectives: Sequence[tuple[str, str, str, int, int]],
    took: float,
    console: Console,
) -> int:
    """Print what was found, and leave the certificate and its page; returns the exit code."""
    subject = certificate.subject_of(small.run)
    content = as_json(subject, small, found, notes, collectives, took)
    print_proof(console, content)
    for path in certificate.write(subject, content, proof_page(content)):
        say(console, f"written: {path}")
    return 0 if content["proved"] else NOT_PROVED


def prepare_devices(count: int) -> None:
    """Opens ``count`` virtual devices: before any backward on the CPU, which would fix their number for autograd."""
    os.environ["CPU_NUM_DEVICES"] = str(count)
    init_runtime()


def compare(small: SmallJob, console: Console) -> list[Difference]:
    """All comparisons of ten steps in float32; and of the first in bfloat16, if the run computes in it."""
    with without_bfloat16():
        found = in_float32(small, console)
    if not in_bfloat16(small.run):
        return found
    with waiting(console, "one step in bfloat16 …"):
        return found + in_coarse(small)


def in_float32(small: SmallJob, console: Console) -> list[Difference]:
    plain, batches, rate = plain_model(small.job), make_batches(small.job, STEPS), small.learning_rate
    with waiting(console, "the plain model …"):
        theirs = plain.run(batches, rate)
    say(console, f"plain:   {STEPS} steps of the plain model; loss {theirs.losses[0]:.4f} to {theirs.losses[-1]:.4f}")
    with waiting(console, "compiling the sharded step …") as status:
        show = (lambda n: status.update(f"step {n} of {STEPS}")) if status is not None else None
        ours = run_sharded(small.job, plain.source, batches, rate, show)
    say(
        console,
        f"sharded: {STEPS} steps on {small.job.devices} virtual devices; "
        f"loss {ours.losses[0]:.4f} to {ours.losses[-1]:.4f}",
    )

    def exact() -> Trajectory:
        with waiting(console, "the plain model in float64 …"):
            return plain.run(batches, rate, torch.float64)

    return judged(ours, theirs, exact)


def in_coarse(small: SmallJob) -> list[Difference]:
    """The first step's loss and gradients in bfloat16, as near to float32's as the plain model's own in bfloat16."""
    plain, first, rate = plain_model(small.job), make_batches(small.job, 1), small.learning_rate
    theirs, rounding = plain.run(first, rate), plain.run(first, rate, torch.bfloat16)
    job = replace(small.job, recipe=small.job.recipe.computing(dtype="bfloat16"))
    ours = run_sharded(job, plain.source, first, rate)
    found = differences(ours, theirs, rounding, COARSE)
    return [replace(each, quantity=f"bfloat16 {each.quantity}") for each in found]


def as_json(
    subject: certificate.Subject,
    small: SmallJob,
    found: Sequence[Difference],
    notes: Sequence[str],
    collectives: Sequence[tuple[str, str, str, int, int]],
    took: float,
) -> dict[str, Any]:
    """The certificate."""
    own = [each for each in found if each.allowed != float("inf")]
    compared: dict[str, list[Difference]] = {}
    for each in own:
        compared.setdefault(each.quantity, []).append(each)
    worst = {name: max(some, key=lambda each: each.share) for name, some in compared.items()}
    return {
        "proved": all(each.good for each in own),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "seconds": round(took, 1),
        "recipe": small.run.recipe.name,
        "recipe_hash": subject.recipe,
        "options": subject.options,
        "family": subject.family,
        "model": small.run.args.model,
        "model_hash": subject.model,
        "precision": ["float32", *(["bfloat16"] if in_bfloat16(small.run) else [])],
        "referee": small.referee,
        "mesh": small.job.plan.mesh,
        "steps": STEPS,
        "versions": versions(),
        "compared": {
            name: {"count": len(compared[name]), "worst": each.off, "allowed": each.allowed, "where": each.name}
            for name, each in worst.items()
        },
        "differences": [[each.quantity, each.name, each.off, each.allowed] for each in own],
        "only_rounding": sorted({each.name for each in found if each.allowed == float("inf")}),
        "layout": list(notes),
        "collectives": [list(row) for row in collectives],
        "smaller": [list(row) for row in small.smaller],
    }
