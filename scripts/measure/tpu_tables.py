"""Prints the tables of docs/records/tpu: each row is a step that scripts/compile.py compiled for a TPU slice elsewhere.

python scripts/measure/tpu_tables.py remat depth   two of the tables
python scripts/measure/tpu_tables.py --list        every table's rows, with the command that compiles each
python scripts/measure/tpu_tables.py exposed --at 4dff923   the same rows, compiled by the code of that commit
python scripts/measure/tpu_tables.py               all tables: hours, but for what was compiled before and is cached

Nothing in them has run on a TPU. Cycles are the compiler's estimate, without those of kernels (Pallas).
"""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.compile.report.estimate import Estimate, ranged
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import say, waiting
from shardwright.report.units import mesh_text
from shardwright.scripts.measure.tables import markdown
from shardwright.scripts.measure.tpu_rows import TABLES

ROOT = Path(__file__).parents[2]
GIB = 2**30
Report = dict[str, Any]


def main() -> int:
    parser = Parser(__doc__)
    known = ", ".join(TABLES)
    parser.add_argument("tables", nargs="*", metavar="table", help=f"which to print (default: all): {known}")
    parser.add_argument("--list", action="store_true", help="print the tables' rows and commands; compile nothing")
    parser.add_argument("--at", metavar="COMMIT", help="compile with the code of this commit (default: this one)")
    arguments = parser.parse_args()
    if unknown := [name for name in arguments.tables if name not in TABLES]:
        parser.error(f"no table {unknown[0]}; there are {known}")
    tables = {name: TABLES[name] for name in arguments.tables or TABLES}
    if arguments.list:
        for name, rows in tables.items():
            for row, options in rows.items():
                print(f"{name}: {row}\n  python scripts/compile.py {options}")
        return 0
    console, found = Console(stderr=True), {name: dict[str, Report]() for name in tables}
    steps = [(name, row, options) for name, rows in tables.items() for row, options in rows.items()]
    with (
        _code(arguments.at) as code,
        ThreadPoolExecutor(2) as pool,
        waiting(console, f"compiling {len(steps)} steps …"),
    ):
        for (name, row, _), report in zip(steps, pool.map(lambda step: compile_one(step[2], code), steps), strict=True):
            say(console, f"{name}: {row}: {report.get('failed') or 'done'}")
            found[name][row] = report
    for name, reports in found.items():
        print(f"\n### {name}\n\n{_table(name, reports)}")
    return 0


@contextlib.contextmanager
def _code(commit: str | None) -> Iterator[Path]:
    """The folder of this code, or of a commit's, checked out for the ``with``."""
    if commit is None:
        yield ROOT
        return
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(["git", "-C", ROOT, "archive", commit], check=True, capture_output=True).stdout
        subprocess.run(["tar", "--extract", "--directory", folder], input=archive, check=True)
        yield Path(folder)


def compile_one(options: str, code: Path = ROOT) -> Report:
    """The JSON report of ``code``'s scripts/compile.py with these options; {"failed": why} if it can't compile."""
    with tempfile.TemporaryDirectory() as folder:
        words = [_file(word, Path(folder)) for word in shlex.split(options)]
        out = Path(folder) / "report.json"
        command = [sys.executable, str(code / "scripts" / "compile.py"), *words, "--json", str(out)]
        environment = importing(code, Path(folder))
        done = subprocess.run(command, cwd=code, env=environment, capture_output=True, text=True, check=False)
        if out.exists():
            return json.loads(out.read_text(encoding="utf-8"))
    lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no output"]
    found = next((number for number, line in enumerate(lines) if "found:" in line), len(lines) - 1)
    return {"failed": " ".join(" ".join(lines[found : found + 2]).split())}


def importing(code: Path, folder: Path) -> dict[str, str]:
    """The environment in which ``import shardwright`` is ``code``'s package, linked together in ``folder``."""
    project = tomllib.loads((code / "pyproject.toml").read_text(encoding="utf-8"))
    package, *parts = project["tool"]["setuptools"]["package-dir"].items()
    root = folder / "path" / package[0]
    root.mkdir(parents=True)
    for each in (code / package[1]).iterdir():
        (root / each.name).symlink_to(each)
    for name, place in parts:
        (root / name.rpartition(".")[2]).symlink_to(code / place)
    others = filter(None, [os.environ.get("PYTHONPATH")])
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(root.parent), *others])}


def _file(word: str, folder: Path) -> str:
    """``word``, or the path of the file that it stands for, written into ``folder``."""
    if not word.startswith("@"):
        return word
    if word == "@prompts":  # each of 1,024 tokens at most
        (folder / "prompts.txt").write_text(("x" * 1024 + "\n") * 16, encoding="utf-8")
        return str(folder / "prompts.txt")
    name, *changes = word[1:].split(",")
    config = json.loads((ROOT / "docs" / "configs" / name).read_text(encoding="utf-8"))
    config.update((key, json.loads(value)) for key, _, value in (change.partition("=") for change in changes))
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(folder / "config.json")


# the columns of a table of train steps, and of one of traffic; all end with the CPU seconds of compiling
_STEPS = ("mesh", "HBM, GiB", "temporaries", "sent, GiB", "exposed", "FLOPs", "cycles", "step, s", "tokens/s", "MFU")
_EXPOSED = ("HBM, GiB", "sent, GiB", "exposed", "waiting, s", "step, s")
_COMPILE = "compile, s of CPU"


def _table(name: str, reports: dict[str, Report]) -> str:
    if name.startswith("graphs"):
        return _graph_table(reports)
    columns = [*(_EXPOSED if name.startswith("exposed") else _STEPS), _COMPILE]
    rows = []
    for row, report in reports.items():
        cells = {columns[0]: report["failed"]} if "failed" in report else _cells(report)
        rows.append([row, *(cells.get(column, "") for column in columns)])
    return markdown(["", *columns], rows)


def _cells(report: Report) -> dict[str, str]:
    """Column → cell: a chip's numbers in a step. Seconds, tokens and MFU include the estimated time of kernels."""
    estimate, host = Estimate(**report["estimate"]), report["host_temp_bytes"] / GIB
    sent, exposed = (sum(line[key] for line in report["collectives"]) for key in ("wire_bytes", "exposed_bytes"))
    cells = {
        "mesh": mesh_text(report["mesh"]),
        "HBM, GiB": f"{report['required_bytes'] / GIB:.1f}",
        "temporaries": f"{report['temp_bytes'] / GIB:.2f}" + (f" + {host:.1f} host" if host else ""),
        _COMPILE: f"{report['compile_seconds']:.0f}",
    }
    if not report["graphs"][0]["fits"]:  # the train step's
        return {**cells, "HBM, GiB": f"{cells['HBM, GiB']}: does not fit {report['chip_hbm_bytes'] / GIB:.1f}"}
    return {
        **cells,
        "sent, GiB": f"{sent / GIB:.1f}",
        "exposed": f"{exposed / GIB:.1f}",
        "FLOPs": f"{report['flops']:.2e}",
        "cycles": f"{report['estimated_cycles'] / 1e9:#.4g}e9",
        "waiting, s": f"{estimate.shares['ici']:.3f}",
        "step, s": ranged(estimate.seconds, (estimate.fastest, estimate.slowest), ".3f"),
        "tokens/s": ranged(estimate.tokens_per_second or 0.0, estimate.rates()),
        "MFU": ranged(estimate.mfu or 0.0, estimate.mfus(), ".1%"),
    }


def _graph_table(reports: dict[str, Report]) -> str:
    """The HBM of each graph of a run beside the run's state."""
    names = list(dict.fromkeys(graph["graph"] for report in reports.values() for graph in report.get("graphs", ())))
    rows = []
    for row, report in reports.items():
        if "failed" in report:
            rows.append([row, report["failed"], *[""] * (len(names) + 1)])
            continue
        needed = {g["graph"]: f"{(g['required_bytes'] + g['held_bytes']) / GIB:.1f}" for g in report["graphs"]}
        first, *others = (graph["compile_seconds"] for graph in report["graphs"])
        rows.append([row, *(needed.get(name, "") for name in names), f"{first:.0f}", f"{sum(others):.0f}"])
    return markdown(["HBM a chip, GiB", *names, f"{_COMPILE}: train step", "the others"], rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
