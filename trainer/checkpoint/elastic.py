"""The same command on another number of devices: the global batch stays, and with it the data's order and the loss.

It is arithmetic on the arguments and the checkpoint, so every host comes to the same.
"""

import math
from dataclasses import replace
from typing import Any

from shardwright.checkpoint.read import RunCheckpoint
from shardwright.errors import UserError
from shardwright.job import Job

OPTIONS = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _saved_batch(resume: RunCheckpoint) -> tuple[int, int, tuple[int, ...]] | None:
    """Devices, rows of a step on all, and the command's :data:`OPTIONS` of the saved run; None: it does not say."""
    mesh, axes = resume.host.get("mesh"), resume.recipe.get("batch")
    sizes: list[Any] = [resume.arguments.get(name) for name in OPTIONS]
    asked = resume.host.get("asked_batch")
    if not isinstance(mesh, dict) or not isinstance(axes, list) or not isinstance(asked, list):
        return None
    factors = [*mesh.values(), *(mesh.get(axis) for axis in axes), *sizes, *asked]
    if not all(type(factor) is int and 0 < factor < 1 << 32 for factor in factors):
        return None
    rows = math.prod(mesh[axis] for axis in axes) * math.prod(sizes)
    return math.prod(mesh.values()), rows, tuple(asked)


def share_of(rows: int, shards: int, most: int) -> tuple[int, int] | None:
    """The two :data:`OPTIONS` of a batch of ``rows``, split ``shards`` ways, ``most`` rows a micro-batch; or None."""
    share, left = divmod(rows, shards)
    if left:
        return None
    micro_batch = max(rows for rows in range(1, most + 1) if share % rows == 0)
    return micro_batch, share // micro_batch


def kept_batch(job: Job, resume: RunCheckpoint) -> tuple[int, int] | None:
    """The two :data:`OPTIONS` that keep the global batch of ``resume``; None: those of ``job`` are to stay.

    They stay on as many devices as before, and where the command asks for another batch than the saved run's did.
    Raises UserError if the batch can't be kept on the job's devices.
    """
    saved, shards = _saved_batch(resume), job.plan.batch_shards
    if saved is None:
        return None
    devices, rows, asked = saved
    if devices == job.devices or asked != job.args.asked_batch or rows == job.rows:
        return None
    kept = share_of(rows, shards, job.args.per_device_train_batch_size)
    if kept is None:
        raise UserError(
            asked=f"to go on from {resume.folder} on {job.devices} devices",
            found=f"its steps take {rows} rows, and these devices split a batch {shards} ways",
            why="each way takes as many rows as the next, and with another batch the data's order and the loss curve "
            "would be another run's",
            instead=f"a number of devices whose ways divide {rows}, or a --mesh of these that splits it less; or "
            f"another batch, by other numbers than the run's --{OPTIONS[0]} {asked[0]} --{OPTIONS[1]} {asked[1]}: "
            f"--{OPTIONS[1]} {asked[1] + 1} has {shards * asked[0] * (asked[1] + 1)} rows a step",
        )
    return kept


def with_kept_batch(job: Job, resume: RunCheckpoint) -> Job:
    """``job`` with the global batch of ``resume`` in its arguments; raises UserError if no such job can be."""
    kept = kept_batch(job, resume)
    if kept is None:
        return job
    rows, accumulation = kept
    args = replace(
        job.args, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation, kept_batch=kept
    )
    return replace(job, args=args)


def said(job: Job, resume: RunCheckpoint) -> str | None:
    """The notice that ``job`` keeps the batch of ``resume`` on other devices, or that its mesh makes another of it."""
    saved, shards = _saved_batch(resume), job.plan.batch_shards
    now = job.args.per_device_train_batch_size, job.args.gradient_accumulation_steps
    if saved is None:
        return None
    devices, rows, asked = saved
    if now != job.args.asked_batch:
        return f"{rows} rows a step, as on the {devices} devices before; on these {job.devices}: {_written(now)}"
    if asked != now or rows == job.rows:
        return None
    kept = share_of(rows, shards, now[0])
    instead = "" if kept is None else f"; {_written(kept)} keeps the {rows}"
    return f"{job.rows} rows a step, {rows} before: this mesh splits a batch {shards} ways{instead}"


def _written(batch: tuple[int, int]) -> str:
    return " ".join(f"--{name} {size}" for name, size in zip(OPTIONS, batch, strict=True))
