"""Prints the tables of docs/tpu.md: each row is a step that scripts/compile.py compiled for a TPU slice elsewhere.

python scripts/measure/tpu_tables.py remat depth   two of the tables
python scripts/measure/tpu_tables.py --list        every table's rows, with the command that compiles each
python scripts/measure/tpu_tables.py exposed --at 4dff923   the same rows, compiled by the code of that commit
python scripts/measure/tpu_tables.py               all tables: hours, but for what was compiled before and is cached

Nothing in them has run on a TPU. Cycles are the compiler's estimate, without those of kernels (Pallas).
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import say, waiting
from shardwright.scripts.measure.tpu_rows import TABLES

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "docs" / "configs"
GIB = 2**30


def main() -> int:
    parser = Parser(__doc__)
    known = ", ".join(TABLES)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"which to print (default: all): {known}")
    parser.add_argument("--list", action="store_true", help="print the tables' rows and commands; compile nothing")
    parser.add_argument("--jobs", type=int, default=2, help="how many compiles run at a time (default: 2)")
    parser.add_argument("--at", metavar="COMMIT", help="compile with the code of this commit (default: this one)")
    parser.add_argument("--json", metavar="FILE", help="also write every row's whole report to this file")
    arguments = parser.parse_args()
    names = arguments.tables or list(TABLES)
    for name in names:
        if name not in TABLES:
            parser.error(f"no table {name}; there are {known}")
    if arguments.list:
        for name in names:
            for row, options in TABLES[name].items():
                print(f"{name}: {row}\n  python scripts/compile.py {options}")
        return 0
    found: dict[str, Any] = {}
    console = Console(stderr=True)
    rows = [(name, row, options) for name in names for row, options in TABLES[name].items()]
    with (
        _code(arguments.at) as code,
        ThreadPoolExecutor(arguments.jobs) as pool,
        waiting(console, f"compiling {len(rows)} steps …"),
    ):
        for (name, row, _), report in zip(rows, pool.map(lambda r: compile_one(r[2], code), rows), strict=True):
            say(console, f"{name}: {row}: {report.get('failed') or 'done'}")
            found.setdefault(name, {})[row] = report
    for name in names:
        kind = name.partition("_")[0]
        table = {"graphs": graph_markdown, "exposed": exposed_markdown}.get(kind, markdown)
        print(f"\n### {name}\n\n{table(found[name])}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


@contextlib.contextmanager
def _code(commit: str | None) -> Iterator[Path]:
    """The folder of this code, or of a commit's, checked out for the ``with``."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        made = ["git", "-C", str(ROOT), "archive", "--format=tar", commit]
        archive = subprocess.run(made, check=True, capture_output=True).stdout
        with tarfile.open(fileobj=io.BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        yield Path(folder)


def compile_one(options: str, code: Path = ROOT) -> dict[str, Any]:
    """The JSON report of ``code``'s scripts/compile.py with these options; {"failed": why} if it can't compile."""
    with tempfile.TemporaryDirectory() as folder:
        words = [_file(word, Path(folder)) for word in shlex.split(options)]
        out = Path(folder) / "report.json"
        command = [sys.executable, str(code / "scripts" / "compile.py"), *words, "--json", str(out)]
        path = os.environ | {"PYTHONPATH": str(code)}  # else the installed code
        done = subprocess.run(command, cwd=code, env=path, capture_output=True, text=True, check=False)
        if not out.exists():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
            found = next((number for number, line in enumerate(lines) if "found:" in line), len(lines) - 1)
            return {"failed": " ".join(" ".join(lines[found : found + 2]).split())}
        return json.loads(out.read_text(encoding="utf-8"))


def _file(word: str, folder: Path) -> str:
    """``word``, with ``@file,key=value,…`` replaced by the path of a so changed config of docs/configs in ``folder``.

    ``@prompts`` is replaced by that of a file of 16 prompts, each of 1,024 tokens at most.
    """
    if not word.startswith("@"):
        return word
    if word == "@prompts":
        (folder / "prompts.txt").write_text(("x" * 1024 + "\n") * 16, encoding="utf-8")
        return str(folder / "prompts.txt")
    name, *changes = word[1:].split(",")
    config = json.loads((CONFIGS / name).read_text(encoding="utf-8"))
    config.update((key, json.loads(value)) for key, _, value in (change.partition("=") for change in changes))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "config.json")


def markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table of train steps; all numbers are a chip's, and traffic, FLOPs and cycles a step's.

    Seconds, tokens and MFU are estimates that include the time of kernels.
    """
    header = ["", "mesh", "HBM, GiB", "temporaries", "sent, GiB", "exposed", "FLOPs", "cycles"]
    header += ["step, s", "tokens/s", "MFU", "compile, s of CPU"]
    return _table(header, [[row, *_cells(report)] for row, report in rows.items()])


def graph_markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table of a run's graphs: the HBM of each beside the run's state, and the CPU seconds of compiling."""
    graphs = list(dict.fromkeys(graph["graph"] for report in rows.values() for graph in report.get("graphs", ())))
    header = ["HBM a chip, GiB", *graphs, "compile, s of CPU: train step", "the others"]
    return _table(header, [[row, *_graph_cells(report, graphs)] for row, report in rows.items()])


def exposed_markdown(rows: dict[str, dict[str, Any]]) -> str:
    """The table of traffic: sent and exposed bytes, and the estimated seconds of waiting and of the step."""
    header = ["", "HBM, GiB", "sent, GiB", "exposed", "waiting, s", "step, s", "compile, s of CPU"]
    return _table(header, [[row, *_exposed_cells(report)] for row, report in rows.items()])


def _table(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(line) + " |" for line in [header, ["---"] * len(header), *rows])


def _graph_cells(report: dict[str, Any], graphs: Sequence[str]) -> Sequence[str]:
    if "failed" in report:
        return [report["failed"], *[""] * (len(graphs) + 1)]
    found = {graph["graph"]: graph for graph in report["graphs"]}
    needed = {name: (graph["required_bytes"] + graph["held_bytes"]) / GIB for name, graph in found.items()}
    first, *others = (graph["compile_seconds"] for graph in found.values())
    return [*(f"{needed[g]:.1f}" if g in needed else "" for g in graphs), f"{first:.0f}", f"{sum(others):.0f}"]


def _exposed_cells(report: dict[str, Any]) -> Sequence[str]:
    if "failed" in report or not report["graphs"][0]["fits"]:
        return [*_cells(report)[0:1], *[""] * 5] if "failed" in report else [_cells(report)[1], *[""] * 5]
    _, needed, _, sent, exposed, *_, seconds = _cells(report)
    estimate = report["estimate"]
    return needed, sent, exposed, f"{estimate['shares']['ici']:.3f}", f"{estimate['seconds']:.3f}", seconds


def _cells(report: dict[str, Any]) -> Sequence[str]:
    if "failed" in report:
        return [report["failed"], *[""] * 10]
    found = report["estimate"]
    sent, exposed = (sum(line[key] for line in report["collectives"]) for key in ("wire_bytes", "exposed_bytes"))
    needed, fits = f"{report['required_bytes'] / GIB:.1f}", report["graphs"][0]["fits"]  # the train step's
    return (
        " × ".join(f"{axis}={size}" for axis, size in report["mesh"].items()),
        needed if fits else f"{needed}: does not fit {report['chip_hbm_bytes'] / GIB:.1f}",
        f"{report['temp_bytes'] / GIB:.2f}" + (f" + {h:.1f} host" if (h := report["host_temp_bytes"] / GIB) else ""),
        f"{sent / GIB:.1f}" if fits else "",
        f"{exposed / GIB:.1f}" if fits else "",
        f"{report['flops']:.2e}" if fits else "",
        f"{report['estimated_cycles'] / 1e9:#.4g}e9" if fits else "",
        f"{found['seconds']:.3f}" if fits else "",
        f"{found['tokens_per_second']:,.0f}" if fits else "",
        f"{found['mfu']:.1%}" if fits else "",
        f"{report['compile_seconds']:.0f}",
    )


if __name__ == "__main__":
    sys.exit(exit_code(main))
