"""`remat="auto"`: the share of a layer's values that the backward need not compute again, found once and kept.

The TPU's own compiler finds it (:mod:`trainer.compile.share`), which takes minutes and no TPU. The answer is kept in
the cache, so that a run on chips starts with it.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.cache import cache_root, digest
from trainer.job import Job

AUTO = "auto"
# what changes the memory of a step, beside the recipe and the model
_COUNTED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_length", "packing", "isolate_documents"),
    *("weight_dtype", "optimizer_dtype", "lora_r", "lora_target", "base_dtype", "objective", "router_balance"),
    *("optim", "optim_args"),
)


@dataclass(frozen=True)
class Platform:
    """What a job runs on.

    Args:
        kind: ``TPU``, ``CPU`` or another of the runtime's names.
        chip: the TPU's generation, ``v5p``; empty: it is none that is known.
    """

    kind: str
    chip: str = ""


def is_auto(job: Job) -> bool:
    """Whether the job's recipe leaves it to us what is kept."""
    return job.recipe.compute.remat == AUTO


def with_remat(job: Job, remat: str | float) -> Job:
    """``job`` under another remat policy."""
    return replace(job, recipe=replace(job.recipe, compute=replace(job.recipe.compute, remat=remat)))


def keep_answer(job: Job, chip: str, share: float) -> Path:
    """Note that ``job``, whose recipe says ``auto``, fits ``chip`` with ``share``.

    Raises:
        UserError: the cache can't be written.
    """
    path = _path(job, chip)
    path.parent.mkdir(exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as made:
        json.dump({"share": share}, made)
    os.replace(made.name, path)
    return path


def answer(job: Job, where: Platform) -> tuple[str | float, str]:
    """The policy that ``auto`` means for ``job``, and why."""
    if where.kind == "CPU":
        return "none", "a host's memory is no HBM"
    path = _path(job, where.chip)
    try:
        share = json.loads(path.read_text())["share"]
        if isinstance(share, int | float) and 0 <= share <= 1:
            return share, f"as scripts/compile.py found for {where.chip}"
    except (OSError, ValueError, KeyError, TypeError):  # there is none, or none that can be read
        pass
    return "full", "nobody has asked scripts/compile.py how much fits (the same options, and --topology)"


def _path(job: Job, chip: str) -> Path:
    args = job.args.as_dict()
    content = [job.recipe.as_dict(), job.config.to_dict(), {name: args[name] for name in _COUNTED}, job.devices, chip]
    return cache_root() / "remat" / f"{digest(json.loads(json.dumps(content, default=str)))}.json"
