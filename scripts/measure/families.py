"""Trains every causal language model family of transformers for one step, tiny, against the plain model on the CPU.

python scripts/measure/families.py --write docs/families.md   what has no result yet, and the page
python scripts/measure/families.py --only gemma2,qwen3_moe --again all
python scripts/measure/families.py --again failed          what did not pass, anew

8 virtual devices, float32, full remat; a mode says the mesh and whether layers are scanned. Compared are the loss and
the gradient of every parameter, with those of transformers' own model: eager, unsharded, dropless. Each family is a
process of its own, with a limit of time and memory. Results are kept in a file, one JSON object a line, under the
version of the code.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.report.bars import tracked

ROOT = Path(__file__).parents[2]
# name → (mesh of the recipe, whether layers are scanned)
MODES = {"scan": (None, True), "unrolled": (None, False), "tensor": ("fsdp=4,tensor=2", True)}
MEMORY = 7 << 30  # most bytes of a worker's data

ENVIRONMENT = {
    "PJRT_DEVICE": "CPU",
    "CPU_NUM_DEVICES": "8",
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    # takes a sixth of the compile time and gives the same numbers to float32's precision
    "XLA_FLAGS": "--xla_backend_optimization_level=0",
}
# the server imports the libraries and opens no device; each family's process is forked from it
_FORKS = multiprocessing.get_context("forkserver")

Result = dict[str, Any]


def main() -> int:
    args = _arguments()
    os.environ.update(ENVIRONMENT)
    _FORKS.set_forkserver_preload(["shardwright.scripts.measure.against_plain"])
    from shardwright.scripts.measure.tiny import LEFT_OUT, families

    version, results = code_version(), _Results(Path(args.results))
    names = args.only.split(",") if args.only else families()
    jobs = {
        name: [m for m in args.modes.split(",") if wanted(results.of(name, m), version, args.again)] for name in names
    }
    jobs = {name: modes for name, modes in jobs.items() if modes}
    console = Console(stderr=True)
    for name in tracked(console, "families", jobs, len(jobs)):
        for result in _run(name, jobs[name], args):
            results.add({**result, "version": version})
            print(_line(result), flush=True)
    print(_totals([r for name in names for m in args.modes.split(",") if (r := results.of(name, m))]))
    if args.write:
        Path(args.write).write_text(page(results.all(), LEFT_OUT))
    return 0


def _arguments() -> argparse.Namespace:
    parser = Parser(__doc__)
    parser.add_argument("--only", help="families, with commas between them (all)")
    parser.add_argument("--modes", default=",".join(MODES), help="of scan, unrolled and tensor (all)")
    parser.add_argument("--again", choices=("failed", "stale", "all"), help="run again what has a result already")
    parser.add_argument("--results", default="families.jsonl", help="where results are kept (families.jsonl)")
    parser.add_argument("--write", help="the table's file, such as docs/families.md")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a family may take (300)")
    return parser.parse_args()


def code_version() -> str:
    """The commit, and a hash of uncommitted changes to the code that trains."""
    paths = ["models", "trainer", "scripts/measure/tiny.py"]
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changes = subprocess.run(["git", "diff", "HEAD", "--", *paths], cwd=ROOT, capture_output=True).stdout
    return commit.strip() + (f"+{hashlib.sha256(changes).hexdigest()[:6]}" if changes else "")


class _Results:
    """Results in a file, one JSON object a line; the last one of a family and mode counts."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        self.found = {(r["family"], r["mode"]): r for r in map(json.loads, lines)}

    def of(self, family: str, mode: str) -> Result | None:
        return self.found.get((family, mode))

    def all(self) -> list[Result]:
        return [self.found[key] for key in sorted(self.found)]

    def add(self, result: Result) -> None:
        self.found[result["family"], result["mode"]] = result
        with self.path.open("a") as file:
            file.write(json.dumps(result) + "\n")


def wanted(found: Result | None, version: str, again: str | None) -> bool:
    if found is None or again == "all":
        return True
    return (again == "failed" and found["verdict"] != "pass") or (again == "stale" and found["version"] != version)


def _run(family: str, modes: Sequence[str], args: argparse.Namespace) -> Iterator[Result]:
    """The results of a family, each once it is there. A mode that crashes its process gives a result too."""
    left = list(modes)
    while left:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            worker = _FORKS.Process(target=work, args=(family, left, folder))
            worker.start()
            worker.join(args.limit * len(left))
            if late := worker.is_alive():
                worker.kill()
                worker.join()
            for line in Path(folder, "out").read_text().splitlines() if Path(folder, "out").exists() else ():
                result = json.loads(line)
                left.remove(result["mode"])
                yield result
            said = Path(folder, "err").read_text(errors="replace")
        if left:
            took = round(time.monotonic() - started, 1)
            cause = f"not done after {took:.0f} s" if late else f"{_ending(worker.exitcode)}; {_last_words(said)}"
            yield {"family": family, "mode": left.pop(0), "verdict": "crash", "cause": cause, "seconds": took}


def work(family: str, modes: Sequence[str], folder: str) -> None:
    """Run the modes of a family in this process of its own, and write a JSON line for each to ``FOLDER/out``."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.dup2(os.open(Path(folder, "err"), os.O_CREAT | os.O_WRONLY), 2)
    from shardwright.scripts.measure import against_plain

    case = against_plain.plain(family)
    for mode in modes:
        started = time.monotonic()
        result = case if isinstance(case, dict) else against_plain.compared(case, *MODES[mode])
        took = round(time.monotonic() - started, 1)
        with Path(folder, "out").open("a") as out:
            out.write(json.dumps({"family": family, "mode": mode, **result, "seconds": took}) + "\n")


def _ending(code: int | None) -> str:
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _last_words(errors: str) -> str:
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in said if "Error" in line or "Check failed" in line or line.startswith("F0")]
    return " ".join((telling or said or ["nothing said"])[-1].split())[:300]


def _line(result: Result) -> str:
    worst = f"{result['worst']:.0e} {result['where']}" if "worst" in result else ""
    words = [f"{result['family']:20}", f"{result['mode']:9}", f"{result['verdict']:8}", f"{result['seconds']:5.0f} s"]
    return " ".join([*words, result.get("layers", ""), worst, result.get("cause", "")[:160]])


def _totals(results: Sequence[Result]) -> str:
    lines = []
    for mode in dict.fromkeys(r["mode"] for r in results):
        counts: dict[str, int] = {}
        for result in (r for r in results if r["mode"] == mode):
            counts[result["verdict"]] = counts.get(result["verdict"], 0) + 1
        lines.append(f"{mode}: " + ", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return "\n".join(lines)


def page(results: Sequence[Result], left_out: Mapping[str, str]) -> str:
    modes = list(dict.fromkeys(r["mode"] for r in results))
    families: dict[str, dict[str, Result]] = {}
    for result in results:
        families.setdefault(result["family"], {})[result["mode"]] = result
    versions = ", ".join(sorted({r["version"] for r in results}))
    rows = [
        "| family | kind | layers | kernels | worst gradient | " + " | ".join(modes) + " |",
        "|---" * (5 + len(modes)) + "|",
        *(_row(name, found, modes) for name, found in families.items()),
    ]
    return "\n".join(
        [
            "# Families",
            "",
            "Printed by `python scripts/measure/families.py --write docs/families.md`; code " + versions + ".",
            "",
            __doc__.partition("\n\n")[2].partition("\n\n")[2].strip(),
            "",
            _totals(results).replace("\n", "  \n"),
            "",
            "*layers*: how they are stored and run: `1 + 4 × 2` is one layer, then a period of 4 twice; a scan runs",
            "what stands before a `×`. *worst gradient*: the largest relative difference (2-norm) of any parameter.",
            "",
            *rows,
            "",
            "Left out:",
            "",
            *(f"- {name}: {why}" for name, why in sorted(left_out.items())),
            "",
        ]
    )


def _row(name: str, found: Mapping[str, Result], modes: Sequence[str]) -> str:
    first = next((r for r in found.values() if "layers" in r), {})
    worst = max((r for r in found.values() if "worst" in r), key=lambda r: r["worst"], default=None)
    gradient = f"{worst['worst']:.0e} `{worst['where']}`" if worst else ""
    verdicts = [_verdict(found[mode]) if mode in found else "" for mode in modes]
    cells = [name, first.get("kind", ""), first.get("layers", ""), first.get("kernels", ""), gradient, *verdicts]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _verdict(result: Result) -> str:
    cause = result.get("cause", "")
    return f"{result['verdict']}: {cause}" if cause else result["verdict"]


if __name__ == "__main__":
    sys.exit(exit_code(main))
