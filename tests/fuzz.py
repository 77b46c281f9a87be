"""Mutated manifests, safetensors, datasets, recipes, options and more: each is read, or refused by a UserError.

`python tests/fuzz.py --minutes 60` runs new cases for an hour; `--cases 10000 --seed 3` so many, the same each time.
A case that ends in anything else, takes too long or takes too much memory is written to --failures and fails the run;
`--replay FILE` runs it again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="8", TF_CPP_MIN_LOG_LEVEL="2", HF_HUB_OFFLINE="1")
os.environ.update(MALLOC_PERTURB_="165", TOKENIZERS_PARALLELISM="false", HF_DATASETS_DISABLE_PROGRESS_BARS="1")
sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.fuzz import KINDS
from tests.support.fuzz.worker import Tally, run_case, run_cases

ROUND = 200  # cases of all kinds together, between two looks at the clock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--cases", type=int, help="how many, instead of --minutes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=KINDS, action="append", help="one kind alone, or several")
    parser.add_argument("--failures", type=Path, default=Path("fuzz-failures"))
    parser.add_argument("--refusals", action="store_true", help="print what was refused, and how often")
    parser.add_argument("--replay", type=Path, help="a file of --failures")
    arguments = parser.parse_args()
    kinds = {name: KINDS[name] for name in arguments.kind or KINDS}
    if arguments.replay:
        kept = json.loads(arguments.replay.read_text())
        tally = Tally()
        run_case(KINDS[kept["kind"]], kept["case"], tally)
        print(dict(tally.outcomes), *(why for _, why in tally.failures))
        return bool(tally.failures)
    tallies = {name: Tally() for name in kinds}
    total = sum(kind.weight for kind in kinds.values())
    end, number = time.monotonic() + 60 * arguments.minutes, arguments.seed * 1_000_000
    size = arguments.cases or ROUND
    while True:
        for name, kind in kinds.items():
            run_cases(kind, -(-size * kind.weight // total), number, tallies[name])
        number += size
        if arguments.cases or time.monotonic() > end:
            if arguments.refusals:
                for name, tally in tallies.items():
                    print(name, *(f"{count:6} {found!a}" for found, count in tally.refusals.most_common(60)), sep="\n")
            return report(tallies, arguments.failures)


def report(tallies: dict[str, Tally], folder: Path) -> int:
    """Prints the tally and keeps the failures in ``folder``; returns the exit code."""
    names = ("succeeded", "refused", "failed")
    print(f"{'kind':12}{'cases':>8}" + "".join(f"{name:>11}" for name in names))
    for name, tally in [*tallies.items(), ("all", sum_of(tallies))]:
        print(f"{name:12}{tally.cases:8}" + "".join(f"{tally.outcomes[outcome]:11}" for outcome in names))
    for name, tally in tallies.items():
        for i, (case, why) in enumerate(tally.failures):
            folder.mkdir(exist_ok=True)
            path = folder / f"{name}-{i}.json"
            path.write_text(json.dumps({"kind": name, "case": case, "why": why}, indent=1))
            print(f"\n{path}: {why.strip().splitlines()[-1][:300]}")
    return any(tally.failures for tally in tallies.values())


def sum_of(tallies: dict[str, Tally]) -> Tally:
    found = Tally()
    for tally in tallies.values():
        found.outcomes += tally.outcomes
    return found


if __name__ == "__main__":
    sys.exit(main())
