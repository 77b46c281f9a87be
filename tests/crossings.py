"""Runs of options drawn together, and what must hold where they meet: a run that goes on is one never stopped, run.yaml
repeats it, another layout has its losses, plain transformers and PEFT have its held-out loss, and more.

`python tests/crossings.py --cases 50 --seed 3` draws 50 combinations, pairs of values not met before first; the same
each time. One that breaks a relation is written to --failures and fails the script; `--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import contextlib
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
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.quick_compile import QUICK_COMPILE

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="2", HF_HUB_OFFLINE="1")
os.environ.update(XLA_FLAGS=QUICK_COMPILE, OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
os.environ.update(HF_DATASETS_DISABLE_PROGRESS_BARS="1", USE_TORCH_XLA="0")

import transformers

from shardwright.errors import UserError
from tests.support import crossing
from tests.support.crossing_relations import ALWAYS, OTHERS, RELATIONS, SaysNothing, live

SECONDS = 600  # of a case
TOGETHER = 8  # cases of a process


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
    parser.add_argument("--share", type=float, default=0.35, help="of the axes that may leave their first value")
    parser.add_argument("--only", action="append", default=[], help="axis=value,value: every case has one of these")
    parser.add_argument("--relation", choices=RELATIONS, action="append", help="these alone")
    parser.add_argument("--failures", type=Path, default=Path("crossing-failures"))
    parser.add_argument("--replay", type=Path, help="a file of --failures")
    asked = parser.parse_args()
    fixed = {axis: values.split(",") for axis, _, values in (each.partition("=") for each in asked.only)}
    for axis, values in fixed.items():
        known = crossing.AXES.get(axis)
        if known is None or not {*values} <= {*known}:
            parser.error(f"--only {axis}={','.join(values)}: it takes {', '.join(known or crossing.AXES)}")
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
            cases = itertools.islice(crossing.drawn(random.Random(asked.seed), fixed, asked.share), asked.cases)
            jobs = [
                {"number": i, "case": values, "seed": asked.seed * 10_000 + i, "relations": asked.relation or turn(i)}
                for i, values in enumerate(cases)
            ]
        in_processes(jobs, bases, tell)
    print(", ".join(f"{name} {count}" for name, count in counts.items()))
    return counts["faults"] > 0


def turn(number: int) -> list[str]:
    """The relations of a case: those of every case, and two of the others."""
    return [f.__name__ for f in (*ALWAYS, *(OTHERS[(number * 2 + i) % len(OTHERS)] for i in range(2)))]


if __name__ == "__main__":
    sys.exit(main())
