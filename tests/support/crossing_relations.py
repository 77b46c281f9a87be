"""Relations that must hold between runs of `tests/crossings.py`, and with plain transformers, PEFT and trl."""

from __future__ import annotations

import io
import json
import random
import shutil
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn
from transformers.trainer_pt_utils import get_parameter_names

import shardwright.run as run
from shardwright.arguments.run_file import read_options
from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.batches import as_batch, heldout_batches
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.evaluation.open_model import open_model
from shardwright.job import Job
from shardwright.prove.reference_optimizers import Reference
from shardwright.step.build import evaluation_step
from shardwright.step.parameter_updates import NO_DECAY
from tests.support import crossing

STEPS, SAVED = 6, 4  # of a run; of the checkpoint that is gone on from
CLOCK = (
    "runtime",
    "per_second",
    "seconds",
    "flos",
    "time",
    "memory",
    "save",
    "compile",
    "goodput",
    "restarts",
    "train_loss",
)
NEUTRAL = {  # options → values with which they do nothing
    "max_grad_norm": 1e9,
    "z_loss": 0.0,
    "label_smoothing_factor": 0.0,
    "router_z_loss_coef": 0.0,
    "router_balance_coef": 0.0,
    "lora_dropout": 0.0,
    "weight_decay": 0.0,
}


class SaysNothing(Exception):
    """A relation that a run has no part in, such as a resume of a run without a checkpoint."""


@dataclass
class Life:
    """A run that ended: its loop, what it said, and its folder."""

    loop: Any
    said: str
    folder: Path

    @property
    def history(self) -> list[dict[str, float]]:
        """The log's entries without what a clock says."""
        entries = json.loads((self.folder / "trainer_state.json").read_text())["log_history"]
        kept = [{k: v for k, v in each.items() if not any(word in k for word in CLOCK)} for each in entries]
        return [each for each in kept if each.keys() - {"step", "epoch", "train_loss", "total_flos"}]

    def after(self, step: int) -> list[dict[str, float]]:
        return [each for each in self.history if each["step"] > step]

    def evaluated(self, step: int) -> dict[str, float]:
        """The results of the evaluation at ``step``, of all sets."""
        return {k: v for each in self.history if each["step"] == step for k, v in each.items() if k.startswith("eval_")}

    @property
    def weights(self) -> dict[str, bytes]:
        return {p.name: p.read_bytes() for p in sorted((self.folder / "model").glob("*.safetensors"))}


def live(options: dict[str, Any], folder: Path) -> Life:
    said = io.StringIO()
    loop = run.train(TrainingArguments(**{**options, "output_dir": str(folder)}), Console(file=said, width=200))
    return Life(loop, said.getvalue(), folder)


# ---- relations: each returns what is wrong, or None; raises SaysNothing of a run that has no part in it ----


def resumed(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Stopped at a checkpoint and gone on with is never stopped."""
    folder, checkpoint = root / "resumed", whole.folder / f"checkpoint-{SAVED}"
    if not checkpoint.is_dir():
        raise SaysNothing
    where = str(checkpoint)
    if draw.random() < 0.5:  # in its own folder
        shutil.copytree(whole.folder, folder, ignore=shutil.ignore_patterns("model", f"checkpoint-{STEPS}"))
        where = "latest"
    other = live({**case.options, "resume_from_checkpoint": where}, folder)
    return different(whole.after(SAVED), other.after(SAVED)) or (
        None if whole.weights == other.weights else f"other weights, from {where}"
    )


def repeated(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """The run.yaml that a run wrote repeats it."""
    read = read_options(str(whole.folder / "run.yaml"))
    return different(whole.history, live(read, root / "repeated").history)


def relaid(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Another mesh, split of the batch, or layers one by one: the same within rounding."""
    if {"capacity", "noisy"} & case.marks:
        raise SaysNothing
    more = crossing.other_layout(case, draw)
    other = live({**case.options, **more}, root / "relaid")
    found = different(whole.history, other.history, rel=5e-3 if "rough" in case.marks else 2e-4)
    return found and f"{more}: {found}"


def plain(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Plain transformers, with PEFT's adapter, has the run's own held-out loss on the model that it wrote."""
    loop = whole.loop
    if "random_base" in case.marks:
        raise SaysNothing
    close = 1e-2 if "rough" in case.marks else 2e-4
    model = crossing.plain_model(whole.folder / "model", case.options["model"], loop.job)
    for name, rows in loop.evaluator.sets.items():
        batch = as_batch(rows.read(torch.arange(len(rows)).numpy()))
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            found = crossing.plain_loss(loop.job, model, batch).item()
        key = f"eval_{name}_loss" if name else "eval_loss"
        said = [each[key] for each in whole.history if key in each][-1]
        if abs(found - said) > close * abs(said) + 1e-6:
            return f"{key} {said}, and plain {found}"
    return None


def stepped(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Plain transformers, with PEFT's adapter, has the logged loss and gradient norm of a step."""
    job, checkpoint = whole.loop.job, whole.folder / f"checkpoint-{SAVED}"
    said = [entry for entry in whole.history if entry["step"] == SAVED + 1 and "loss" in entry]
    if not checkpoint.is_dir() or not said or job.args.logging_steps > 1 or _in_parts(job):
        raise SaysNothing
    if {"noisy", "capacity", "random_base"} & case.marks or {
        "router_z_loss_coef",
        "router_balance_coef",
    } & case.options.keys():
        raise SaysNothing
    crossing.export(checkpoint, root / "stepped", *(() if job.lora else ("--format", "fp32")))
    model = crossing.plain_model(root / "stepped", case.options["model"], job)
    whole.loop.batches.load_state_dict(json.loads((checkpoint / "host.json").read_text())["data"])
    with warnings.catch_warnings(action="ignore"):
        loss = crossing.plain_loss(job, model, next(whole.loop.batches), training=True)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]).norm()
    close = 3e-2 if "rough" in case.marks else 5e-4
    for name, found in {"loss": loss.item(), "grad_norm": norm.item()}.items():
        if abs(found - said[0][name]) > close * abs(found) + 1e-5:
            return f"{name} {said[0][name]}, and plain {found}"
    return None


def trained(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Plain transformers under torch's own optimizer has the logged loss and gradient norm of every step."""
    job, args = whole.loop.job, whole.loop.args
    more = {"on_spike", "router_bias_update_rate", "from_scratch", "lora_r"} & case.options.keys()
    if {"noisy", "capacity", "rough", "unlike"} & case.marks or more:
        raise SaysNothing
    if args.entry.scores_texts or args.logging_steps > 1 or _in_parts(job):  # a score's head is random
        raise SaysNothing
    model = crossing.plain_model(Path(case.options["model"]), case.options["model"], job)
    named, schedule = dict(model.named_parameters()), args.schedule(whole.loop.rate)
    optimizer = Reference(named, args, get_parameter_names(model, [nn.LayerNorm], NO_DECAY), whole.loop.rate)
    whole.loop.batches._begin({"epoch": 0, "row": 0})
    for said in (entry for entry in whole.history if "grad_norm" in entry):
        model.zero_grad()
        loss = crossing.plain_loss(job, model, next(whole.loop.batches), training=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm or torch.inf)
        for name, found in {"loss": loss.item(), "grad_norm": norm.item()}.items():
            if abs(found - said[name]) > 2e-3 * abs(found) + 1e-5:
                return f"step {said['step']}: {name} {said[name]}, and plain {found}"
        optimizer.step(schedule.learning_rate)
        schedule.advance()
    return None


def _in_parts(job: Job) -> bool:
    """True where a step's loss is not that of its rows together, as micro-batches have losses of their own."""
    return job.args.gradient_accumulation_steps > 1 and (job.router_loss or job.args.objective == "kto")


def batched(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """An evaluation in batches of another size has the same result."""
    loop, goal, last = whole.loop, whole.loop.args.goal, whole.evaluated(STEPS)
    if loop.args.objective == "kto" or goal.whole_batch:  # an answer is compared with others of its batch
        raise SaysNothing
    size = loop.job.plan.batch_shards * draw.choice([1, 3])
    for name, rows in loop.evaluator.sets.items():
        prefix = f"eval_{name}" if name else "eval"
        again = evaluation_step(loop.placed)(heldout_batches(rows, size)).named(prefix)
        there = {key: last[key] for key in again}
        if wrong := different([{"step": STEPS, **there}], [{"step": STEPS, **again}], rel=1e-4):
            return f"in batches of {size}, not {loop.job.evaluation_rows}: {wrong}"
    return None


def evaluated(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """The last checkpoint and the model folder, opened for an evaluation, have the loss that the run logged."""
    loop, options = whole.loop, case.options
    apart = {"load_best_model_at_end", "from_scratch"} & options.keys()
    if loop.args.entry.scores_texts or loop.reference is not None or apart:
        raise SaysNothing
    said = whole.evaluated(STEPS)
    given = {name: options[name] for name in ("recipe", "mesh", "compute", "base_dtype") if name in options}
    for place in (whole.folder / f"checkpoint-{STEPS}", whole.folder / "model"):
        if not place.is_dir():
            continue
        asked = EvaluationArguments(model=str(place), tasks="none", **given)
        placed, _ = open_model(asked, Console(file=io.StringIO()))
        if loop.args.goal.parts:
            continue
        name, rows = next(iter(loop.evaluator.sets.items()))
        found = evaluation_step(placed)(loop.evaluator._batches(rows, False)).loss
        key = f"eval_{name}_loss" if name else "eval_loss"
        if abs(found - said.get(key, found)) > (1e-2 if "rough" in case.marks else 1e-4) * abs(found):
            return f"{place.name}: {key} {said[key]}, and opened again {found}"
    return None


def exported(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """An export of the last checkpoint is the model folder that the run left."""
    checkpoint = whole.folder / f"checkpoint-{STEPS}"
    if not checkpoint.is_dir() or "load_best_model_at_end" in case.options:
        raise SaysNothing
    saved = crossing.export(checkpoint, root / "exported")
    return None if saved == whole.weights else f"other files: {[*saved]} and {[*whole.weights]}"


def merged(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """An adapter merged by export has the held-out loss of the adapter beside its base, in plain transformers."""
    checkpoint = whole.folder / f"checkpoint-{STEPS}"
    if whole.loop.job.lora is None or not checkpoint.is_dir() or {"quantized"} & case.marks:
        raise SaysNothing
    if {"load_best_model_at_end", "from_scratch"} & case.options.keys():
        raise SaysNothing
    crossing.export(checkpoint, root / "merged", "--merge", "--format", "fp32")
    rows = whole.loop.evaluator.first
    batch = as_batch(rows.read(torch.arange(len(rows)).numpy()))
    losses = []
    for folder in (whole.folder / "model", root / "merged"):
        model = crossing.plain_model(folder, case.options["model"], whole.loop.job)
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            losses.append(crossing.plain_loss(whole.loop.job, model, batch).item())
    return (
        None
        if abs(losses[0] - losses[1]) < 1e-4 * abs(losses[0]) + 1e-6
        else f"adapter {losses[0]}, merged {losses[1]}"
    )


def neutral(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Features with values that do nothing are features left off."""
    free = {k: v for k, v in NEUTRAL.items() if k not in case.options and crossing.means(k, case)}
    free.pop("max_grad_norm", None)
    if not free:
        raise SaysNothing
    return different(whole.history, live({**case.options, **free}, root / "neutral").history)


def moved(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Gone on with on another mesh, or with layers one by one: the same within rounding."""
    checkpoint = whole.folder / f"checkpoint-{SAVED}"
    if {"capacity", "noisy"} & case.marks or not checkpoint.is_dir():
        raise SaysNothing
    more = crossing.other_layout(case, draw)
    other = live({**case.options, **more, "resume_from_checkpoint": str(checkpoint)}, root / "moved")
    found = different(whole.after(SAVED), other.after(SAVED), rel=5e-3 if "rough" in case.marks else 2e-4)
    return found and f"{more}: {found}"


def watched(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Logging, evaluating, answering and saving change no weight, and losses have the same sum."""
    options = case.options
    if {"load_best_model_at_end", "on_spike"} & options.keys():
        raise SaysNothing
    more = {"logging_steps": draw.choice([1, 2, 3]), "eval_on_start": draw.random() < 0.5}
    more |= draw.choice([{"eval_strategy": "no"}, {"eval_strategy": "steps", "eval_steps": draw.choice([1, 2, 3])}])
    more |= draw.choice([{"save_strategy": "no"}, {"save_strategy": "steps", "save_steps": draw.choice([1, 3])}])
    left = {k: v for k, v in options.items() if not k.startswith(("save_", "eval_s", "sample_", "logging", "staging"))}
    other = live({**left, **more}, root / "watched")
    sums = [_summed(each.history) for each in (whole, other)]
    if whole.weights != other.weights:
        return f"{more}: other weights"
    return None if abs(sums[0] - sums[1]) <= 1e-5 * abs(sums[0]) else f"{more}: losses come to {sums}"


def _summed(history: list[dict[str, float]]) -> float:
    """The losses of all steps, of which each entry has a mean."""
    steps = [0, *(int(entry["step"]) for entry in history if "loss" in entry)]
    losses = [entry["loss"] for entry in history if "loss" in entry]
    return sum(loss * (end - start) for loss, start, end in zip(losses, steps, steps[1:], strict=False))


def again(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """A new run from the model folder begins with the held-out loss that the run ended with."""
    options, folder = case.options, str(whole.folder / "model")
    if whole.loop.reference is not None:  # other starting weights
        raise SaysNothing
    given = {"adapter": folder} if whole.loop.job.lora else {"model": folder, "from_scratch": False}
    left = ("load_best", "lr_", "warmup", "lora", "use_", "rank_", "alpha_", "layers_to", "modules_to", "init_lora")
    left += ("trainable_token", "save_", "eval_s", "eval_on", "on_sp", "spike")
    kept = {k: v for k, v in options.items() if not k.startswith(left)}
    other = live({**kept, **given, "max_steps": 1, "warmup_steps": 0, "eval_on_start": True}, root / "again")
    close = 1e-2 if "rough" in case.marks else 1e-4
    return different([{"step": 0, **whole.evaluated(STEPS)}], [{"step": 0, **other.evaluated(0)}], rel=close)


def unpacked(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Samples, each in a row of its own or sharing rows, have one held-out loss."""
    options = case.options
    if case.kind in ("texts", "columns", "taught", "marked"):  # no samples; or compared with others of its batch
        raise SaysNothing
    more = {"max_steps": 1, "warmup_steps": 0, "max_eval_rows": 0, "eval_strategy": "no", "eval_on_start": True}
    more |= {"eval_dataset": case.held("one"), "save_strategy": "no"}
    left = {k: v for k, v in options.items() if not k.startswith(("lr_", "load_best", "packing", "on_sp", "spike"))}
    lives = [live({**left, **more, "packing": packing}, root / f"packing-{packing}") for packing in (True, False)]
    found = ([{"step": 0, **each.evaluated(0)}] for each in lives)
    return different(*found, rel=1e-2 if "rough" in case.marks else 1e-4)


def felt(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """A value other than the default changes something that is written or said."""
    axis = draw.choice([name for name, value in case.values.items() if value != crossing.first(name)] or [None])
    if axis is None:
        raise SaysNothing
    without = crossing.Case({**case.values, axis: crossing.first(axis)}, case.bases)
    try:
        other = live(without.options, root / "felt")
    except UserError:
        raise SaysNothing from None
    said = [[line for line in each.said.splitlines() if line.startswith("    ")] for each in (whole, other)]
    same = (whole.history, whole.weights, said[0]) == (other.history, other.weights, said[1])
    return f"{axis}={case.values[axis]} changes nothing" if same and axis not in crossing.SILENT else None


# the first are tried of every case
ALWAYS = (plain, stepped, trained, batched)
OTHERS = (resumed, relaid, evaluated, felt, moved, exported, again, repeated, watched, neutral, merged, unpacked)
RELATIONS = {f.__name__: f for f in (*ALWAYS, *OTHERS)}


def different(one: list[dict[str, float]], other: list[dict[str, float]], rel: float = 0.0) -> str | None:
    """The first difference of two logs; with ``rel``, one above that share of a value."""
    names = [[(entry["step"], *sorted(entry)) for entry in log] for log in (one, other)]
    if names[0] != names[1]:
        mine, theirs = ([each for each in names[i] if each not in names[1 - i]][:2] for i in (0, 1))
        return f"other entries: {mine} / {theirs} of {len(one)}, {len(other)}"
    for mine, theirs in zip(one, other, strict=True):
        for key, value in mine.items():
            if value == theirs[key] or (value != value and theirs[key] != theirs[key]):
                continue
            close = rel and isinstance(value, float) and abs(value - theirs[key]) <= rel * max(1.0, abs(value))
            if not close and not (rel and "accurac" in key):
                return f"step {mine['step']}: {key} {value!r} and {theirs[key]!r}"
    return None
