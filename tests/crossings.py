"""Runs of options drawn together, and what must hold where they meet: a run that goes on is one never stopped, run.yaml
repeats it, another layout has its losses, plain transformers and PEFT have its held-out loss, and more.

`python tests/crossings.py --cases 50 --seed 3` draws 50 combinations, pairs of values not met before first; the same
each time. One that breaks a relation is written to --failures and fails the script; `--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import select
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.quick_compile import QUICK_COMPILE

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="2", HF_HUB_OFFLINE="1")
os.environ.update(XLA_FLAGS=QUICK_COMPILE, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", USE_TORCH_XLA="0")

import torch
import transformers
from rich.console import Console

import shardwright.run as run
from shardwright.arguments.run_file import read_options
from shardwright.arguments.training import TrainingArguments
from shardwright.data.rows.batches import as_batch
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.evaluation.open_model import open_model
from shardwright.step.build import evaluation_step
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
SECONDS = 600  # of a case
TOGETHER = 8  # cases of a process
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
    if {"capacity", "noisy", "quantized"} & case.marks:
        raise SaysNothing
    more = crossing.other_layout(case, draw)
    other = live({**case.options, **more}, root / "relaid")
    found = different(whole.history, other.history, rel=2e-3 if "rough" in case.marks else 2e-4)
    return found and f"{more}: {found}"


def plain(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """Plain transformers, with PEFT's adapter, has the run's own held-out loss on the model that it wrote."""
    loop = whole.loop
    if {"loss_type", "f_divergence_type"} & case.options.keys():  # whose formulas the reference lacks
        raise SaysNothing
    if "quantized" in case.marks or {"load_best_model_at_end", "from_scratch"} & case.options.keys():
        raise SaysNothing
    close = 1e-2 if "rough" in case.marks else 2e-4
    model = crossing.plain_model(whole.folder / "model", case.options["model"], loop.job)
    for name, rows in loop.evaluator.sets.items():
        batch = as_batch(rows.read(torch.arange(len(rows)).numpy()))
        with torch.no_grad(), warnings.catch_warnings(action="ignore"):
            found = crossing.plain_loss(loop.job, model, batch)
        key = f"eval_{name}_loss" if name else "eval_loss"
        said = [each[key] for each in whole.history if key in each][-1]
        if abs(found - said) > close * abs(said) + 1e-6:
            return f"{key} {said}, and plain {found}"
    return None


def evaluated(case: crossing.Case, whole: Life, root: Path, draw: random.Random) -> str | None:
    """The last checkpoint and the model folder, opened for an evaluation, have the loss that the run logged."""
    loop, options = whole.loop, case.options
    apart = {"load_best_model_at_end", "from_scratch"} & options.keys()
    if loop.args.entry.scores_texts or loop.reference is not None or apart:
        raise SaysNothing
    said = {k: v for k, v in whole.history[-1].items() if k.startswith("eval_")}
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
            losses.append(crossing.plain_loss(whole.loop.job, model, batch))
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


RELATIONS = {f.__name__: f for f in (resumed, plain, relaid, evaluated, felt, exported, repeated, neutral, merged)}


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


# ---- cases ----


def examine(values: dict[str, str], bases: Path, root: Path, chosen: list[str], seed: int) -> dict[str, Any]:
    """Runs a case until its options are taken, leaving out what a refusal is about; then tries the relations."""
    draw, case = random.Random(seed), crossing.Case(values, bases)
    found: dict[str, Any] = {"refusals": [], "checked": [], "faults": []}
    while True:
        shutil.rmtree(root / "whole", ignore_errors=True)
        try:
            whole = live(case.options, root / "whole")
            break
        except UserError as error:
            late = (root / "whole" / "trainer_state.json").exists()
            found["refusals"].append(
                ("late: " if late else "") + str(error).replace(str(root), "").replace("\n", " | ")
            )
            if late:
                found["faults"].append(("refused late", str(error)))
            if (less := case.less(error)) is None:
                return found
            case = less
    found["values"] = case.values
    for name in chosen:
        try:
            wrong = RELATIONS[name](case, whole, root, draw)
        except SaysNothing:
            continue
        except UserError as error:
            wrong = f"refused: {error}"
        except Exception:
            wrong = traceback.format_exc()[-1500:]
        found["checked"].append(name)
        if wrong:
            found["faults"].append((name, wrong))
    return found


def in_processes(jobs: list[dict[str, Any]], bases: Path, tell: Any) -> None:
    """Examines ``jobs``, :data:`TOGETHER` in a forked process with devices of its own; one that dies is told of too."""
    done = 0
    while done < len(jobs):
        readable, writable = os.pipe()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            _child(jobs[done : done + TOGETHER], bases, writable)
        os.close(writable)
        with os.fdopen(readable) as answers:
            lines = _lines(answers)
            for found in lines:
                tell(jobs[done], found)
                done += 1
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, 9)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            tell(jobs[done], {"refusals": [], "checked": [], "faults": [("process", "it died or did not end")]})
            done += 1


def _lines(answers: Any) -> Iterator[dict[str, Any]]:
    while select.select([answers], [], [], SECONDS)[0] and (line := answers.readline()):
        yield json.loads(line)


def _child(jobs: list[dict[str, Any]], bases: Path, answer: int) -> None:
    if not os.environ.get("CROSSING_STDERR"):
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nothing, stream)
    for job in jobs:
        begun = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="crossing-") as root:
            try:
                found = examine(job["case"], bases, Path(root), job["relations"], job["seed"])
            except BaseException:
                found = {"refusals": [], "checked": [], "faults": [("run", traceback.format_exc()[-2500:])]}
        os.write(answer, json.dumps({**found, "took": time.monotonic() - begun}).encode() + b"\n")
    os._exit(0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", action="append", default=[], help="axis=value that every case has")
    parser.add_argument("--relation", choices=RELATIONS, action="append", help="these alone")
    parser.add_argument("--failures", type=Path, default=Path("crossing-failures"))
    parser.add_argument("--replay", type=Path, help="a file of --failures")
    asked = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    counts: Counter[str] = Counter()

    def tell(job: dict[str, Any], found: dict[str, Any]) -> None:
        counts.update(cases=1, accepted="values" in found, refusals=len(found["refusals"]), faults=len(found["faults"]))
        counts.update(found["checked"])
        values = found.get("values", job["case"])
        changed = " ".join(f"{axis}={value}" for axis, value in values.items() if value != crossing.first(axis))
        print(f"{job['number']:4} {found.get('took', 0):5.1f} s {changed}")
        for text in found["refusals"]:
            print(f"       refused: {text[:250]}")
        if found["faults"]:
            asked.failures.mkdir(exist_ok=True)
            path = asked.failures / f"{asked.seed}-{job['number']}.json"
            path.write_text(json.dumps({**job, **found}, indent=1))
        for name, text in found["faults"]:
            print(f"  FAULT {path} {name}: {text[-900:]}")
        sys.stdout.flush()

    with tempfile.TemporaryDirectory(prefix="crossing-bases-") as made:
        bases = Path(made)
        os.environ["SHARDWRIGHT_CACHE"] = str(bases / "cache")
        crossing.write_bases(bases)
        if asked.replay:
            jobs = [json.loads(asked.replay.read_text())]
            jobs[0]["relations"] = asked.relation or jobs[0]["relations"]
        else:
            fixed = dict(each.split("=", 1) for each in asked.only)
            cases = itertools.islice(crossing.drawn(random.Random(asked.seed), fixed), asked.cases)
            jobs = [
                {"number": i, "case": values, "seed": asked.seed * 10_000 + i, "relations": asked.relation or turn(i)}
                for i, values in enumerate(cases)
            ]
        in_processes(jobs, bases, tell)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return counts["faults"] > 0


def turn(number: int) -> list[str]:
    """The relations of a case: the first two, and two of the others."""
    names = [*RELATIONS]
    rest = names[2:]
    return [*names[:2], *(rest[(number * 2 + i) % len(rest)] for i in range(2))]


if __name__ == "__main__":
    sys.exit(main())
