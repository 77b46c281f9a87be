"""Trains every causal language model family of transformers for one step, tiny, against the plain model on the CPU.

python scripts/measure/families.py --write docs/records/families.md   what has no result yet, and the page
python scripts/measure/families.py --only gemma2,qwen3_moe --again all
python scripts/measure/families.py --again failed          what did not pass, anew
python scripts/measure/families.py --configs tests/model/real_configs.jsonl.gz --modes three --results published.jsonl
                                                           published models: shrunk, with all that is special to them

The mode bf16 is the step in bfloat16 of `prove --bf16`: of the model at its own size a run is planned, then proved.

8 virtual devices, 8 rows of 128 tokens, float32, full remat; a mode says the mesh and whether layers are scanned. In
rows of that length XLA runs operations of a device beside each other, so that devices wait for one another in more than
one place. Compared are the loss and the gradient of every parameter, with those of transformers' own model: eager,
unsharded, dropless.
Each family is a process of its own, with a limit of time and memory. Results are kept in a file, a JSON object a line,
under the version of the code. Every size is shrunk here; tests/model/test_real_configs.py reads the config.json of
published models and plans one of each type. Of published configs that are the same once they are shrunk, one is taken.
"""

import datetime
import gzip
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
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.report.bars import tracked
from shardwright.scripts.measure.tables import largest, markdown, markdown_row

ROOT = Path(__file__).parents[2]
PAGE = """# {title}

```
python scripts/measure/families.py {options}
```

| | |
|---|---|
| date, code | {dates}: {versions} |
| passed | {totals} |
| run | 8 virtual devices, 8 rows of 128 tokens, float32, full remat; a mode says the mesh and whether layers are scanned. At that length XLA runs operations of a device beside each other, so that devices wait for one another in more than one place |
| meshes | scan, unrolled: the recipe's own; tensor: fsdp=4 × tensor=2; three: the same, with experts fsdp=2 × expert=2 × tensor=2 |
| compared | the loss and the gradient of every parameter, with those of transformers' own model: eager, unsharded, dropless |
| sizes | every one is shrunk; {sizes} |
| layers | how they are stored and run: `1 + 4 × 2` is one layer, then a period of 4 twice; a scan runs what stands before a `×` |
| worst gradient | the largest relative difference (2-norm) of any parameter |

{table}
"""  # noqa: E501
LEFT_OUT_PART = """
## Left out

| families | why |
|---|---|
{others}
"""
_ASKED = {  # whether published configs were → what the page says of them
    False: {
        "title": "Families",
        "options": "--write docs/records/families.md",
        "sizes": "tests/model/test_real_configs.py reads published config.json files and plans one of each type",
    },
    True: {
        "title": "A step of published models",
        "options": "--configs tests/model/real_configs.jsonl.gz --modes three --write docs/records/published_steps.md",
        "sizes": "all else is as in the published config.json; of those that are the same then, one is taken",
    },
}
# name → (mesh of the recipe, whether layers are scanned, another mesh of models with experts)
MODES: dict[str, tuple[str | None, bool, str | None]] = {
    "scan": (None, True, None),
    "unrolled": (None, False, None),
    "tensor": ("fsdp=4,tensor=2", True, None),
    "three": ("fsdp=4,tensor=2", True, "fsdp=2,expert=2,tensor=2"),
}
BF16 = "bf16"  # on the meshes of three; what is compared is what `prove` compares
MEMORY = 12 << 30  # most bytes of a worker's data
# values of a config that change no number of a step
_SAYS_NOTHING = {
    "architectures",
    "auto_map",
    "dtype",
    "quantization_config",
    "_name_or_path",
    "transformers_version",
} | {f"{token}_token_id" for token in ("bos", "eos", "pad")}

ENVIRONMENT = {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "8", "TF_CPP_MIN_LOG_LEVEL": "2", "HF_HUB_OFFLINE": "1"}
# with these flags a compile takes a sixth of its time and less, and gives the same numbers to float32's precision
FLAGS = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
FLAGS += " --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
ENVIRONMENT |= {"OMP_NUM_THREADS": "1", "XLA_FLAGS": FLAGS}
# the server imports the libraries and opens no device; each family's process is forked from it
_FORKS = multiprocessing.get_context("forkserver")

Result = dict[str, Any]
Results = dict[tuple[str, str], Result]  # (family, mode) → the last result


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--only", help="families, with commas between them (all)")
    parser.add_argument(
        "--configs", type=Path, help="published configs in place of families: JSON lines of name, config"
    )
    parser.add_argument("--modes", default="scan,unrolled,tensor", help="of them, three, bf16 (scan,unrolled,tensor)")
    parser.add_argument("--again", choices=("failed", "stale", "all"), help="run again what has a result already")
    parser.add_argument("--results", type=Path, default="families.jsonl", help="the results' file (families.jsonl)")
    parser.add_argument("--write", type=Path, help="the table's file, such as docs/records/families.md")
    parser.add_argument("--limit", type=int, default=300, help="seconds that a family may take (300)")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    _FORKS.set_forkserver_preload(["shardwright.scripts.measure.against_plain"])
    from shardwright.models.tiny import LEFT_OUT, families

    lines = args.results.read_text().splitlines() if args.results.exists() else []
    results: Results = {(result["family"], result["mode"]): result for result in map(json.loads, lines)}
    version, modes = code_version(), args.modes.split(",")
    published = {} if args.configs is None else distinct(args.configs)
    known = list(published) or families()
    names = args.only.split(",") if args.only else known
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--only {unknown[0]}: not among the {len(known)} that are told apart")
    jobs = {name: [m for m in modes if wanted(results.get((name, m)), version, args.again)] for name in names}
    jobs = {name: left for name, left in jobs.items() if left}
    for name in tracked(Console(stderr=True), "families", jobs, len(jobs)):
        for result in _run(name, jobs[name], args.limit, published.get(name)):
            result |= {"version": version, "date": datetime.date.today().isoformat()}
            results[name, result["mode"]] = result
            with args.results.open("a") as file:
                file.write(json.dumps(result) + "\n")
            print(_line(result), flush=True)
    print(_totals([results[name, mode] for name in names for mode in modes if (name, mode) in results]))
    if args.write:
        left_out = LEFT_OUT if args.configs is None else {}
        args.write.write_text(page([results[key] for key in sorted(results)], left_out))
    return 0


def distinct(file: Path) -> dict[str, dict[str, Any]]:
    """Name → the config.json of published models; the first of those that are the same once they are shrunk."""
    from shardwright.model.meta_model import config_of
    from shardwright.models.tiny import shrunk

    found: dict[str, dict[str, Any]] = {}
    for row in map(json.loads, gzip.decompress(file.read_bytes()).splitlines()):
        try:
            small = shrunk(config_of(row["config"]).get_text_config()).to_dict()
            key = json.dumps({k: v for k, v in small.items() if k not in _SAYS_NOTHING}, sort_keys=True, default=str)
        except Exception:  # of a type that transformers does not know; its own process says so
            key = row["name"]
        found.setdefault(key, row)
    return {row["name"]: row["config"] for row in found.values()}


def code_version() -> str:
    """The commit, and a hash of uncommitted changes to the code that trains."""
    paths = ["models", "trainer"]
    commit = subprocess.run(["git", "rev-parse", "--short=7", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout
    changes = subprocess.run(["git", "diff", "HEAD", "--", *paths], cwd=ROOT, capture_output=True).stdout
    return commit.strip() + (f"+{hashlib.sha256(changes).hexdigest()[:6]}" if changes else "")


def wanted(found: Result | None, version: str, again: str | None) -> bool:
    if found is None or again == "all":
        return True
    return (again == "failed" and found["verdict"] != "pass") or (again == "stale" and found["version"] != version)


def _run(family: str, modes: Sequence[str], limit: int, published: Mapping[str, Any] | None) -> Iterator[Result]:
    """The results of a family, each once it is there. A mode that crashes its process gives a result too."""
    left = list(modes)
    while left:
        started = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            out, err = (Path(folder, name) for name in ("out", "err"))
            out.touch()
            err.touch()
            worker = _FORKS.Process(target=work, args=(family, left, out, err, published))
            worker.start()
            worker.join(limit * len(left))
            if late := worker.is_alive():
                worker.kill()
                worker.join()
            for line in out.read_text().splitlines():
                result = json.loads(line)
                left.remove(result["mode"])
                yield result
            said = err.read_text(errors="replace")
        if left:
            took = round(time.monotonic() - started, 1)
            code = worker.exitcode or 0
            ending = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            cause = f"not done after {took:.0f} s" if late else f"{ending}; {_last_words(said)}"
            yield {"family": family, "mode": left.pop(0), "verdict": "crash", "cause": cause, "seconds": took}


def work(family: str, modes: Sequence[str], out: Path, err: Path, published: Mapping[str, Any] | None = None) -> None:
    """Run the modes of a family in this process of its own, and write a JSON line for each to ``out``."""
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    os.dup2(os.open(err, os.O_WRONLY), 2)
    from shardwright.scripts.measure import against_plain

    case = None
    for mode in modes:
        started = time.monotonic()
        if mode == BF16:
            result = against_plain.proved(family, published, *MODES["three"][::2])
        else:
            case = case or against_plain.plain(family, published)
            result = case if isinstance(case, dict) else against_plain.compared(case, *MODES[mode])
        took = round(time.monotonic() - started, 1)
        with out.open("a") as file:
            file.write(json.dumps({"family": family, "mode": mode, **result, "seconds": took}) + "\n")


def _last_words(errors: str) -> str:
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    telling = [line for line in said if "Error" in line or "Check failed" in line or line.startswith("F0")]
    return " ".join((telling or said or ["nothing said"])[-1].split())[:300]


def _line(result: Result) -> str:
    worst = f"{result['worst']:.0e} {result['where']}" if "worst" in result else ""
    words = [f"{result['family']:20}", f"{result['mode']:9}", f"{result['verdict']:8}", f"{result['seconds']:5.0f} s"]
    return " ".join([*words, result.get("layers", ""), worst, result.get("cause", "")[:160]])


def _totals(results: Sequence[Result]) -> str:
    counts = Counter((result["mode"], result["verdict"]) for result in results)
    lines: dict[str, list[str]] = {result["mode"]: [] for result in results}
    for (mode, verdict), count in sorted(counts.items()):
        lines[mode].append(f"{count} {verdict}")
    return "\n".join(f"{mode}: {', '.join(found)}" for mode, found in lines.items())


def page(results: Sequence[Result], left_out: Mapping[str, str]) -> str:
    """The record of ``results``: of families with those ``left_out``, or of published configs if there are none."""
    modes = list(dict.fromkeys(result["mode"] for result in results))
    families: dict[str, dict[str, Result]] = {}
    for result in results:
        families.setdefault(result["family"], {})[result["mode"]] = result
    versions = ", ".join(sorted({result["version"] for result in results}))
    dates = " to ".join(sorted({result["date"] for result in results if "date" in result}))
    totals = _totals(results).replace("\n", "; ")
    header = ["family", "kind", "layers", "kernels", "worst gradient", *modes]
    table = markdown(header, (_row(*each, modes) for each in families.items()))
    reasons: dict[str, list[str]] = {}
    for name, why in sorted(left_out.items()):
        reasons.setdefault(why, []).append(name)
    others = "\n".join(markdown_row([", ".join(names), why]) for why, names in reasons.items())
    text = PAGE.format(dates=dates, versions=versions, totals=totals, table=table, **_ASKED[not left_out])
    return text + LEFT_OUT_PART.format(others=others) if left_out else text


def _row(name: str, found: Mapping[str, Result], modes: Sequence[str]) -> list[str]:
    first = next((r for r in found.values() if "layers" in r), {})
    worst = max((r for r in found.values() if "worst" in r), key=lambda r: largest([r["worst"]]), default=None)
    gradient = f"{worst['worst']:.0e} `{worst['where']}`" if worst else ""
    verdicts = [
        ": ".join(filter(None, (found[m]["verdict"], found[m].get("cause")))) if m in found else "" for m in modes
    ]
    cells = [name, first.get("kind", ""), first.get("layers", ""), first.get("kernels", ""), gradient, *verdicts]
    return [cell.replace("|", "\\|") for cell in cells]


if __name__ == "__main__":
    sys.exit(exit_code(main))
