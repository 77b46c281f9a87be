"""The estimate of compile.py for a module that is compiled already: any program's optimised HLO text.

python scripts/measure/count_hlo.py MODULE.txt --topology v5p:4x4x4 --mesh fsdp=64 \
    --model docs/configs/mixtral_8x7b.json --rows 2304 --sequence_length 4096

MODULE is the text as libtpu writes it after optimisation, for all chips of the slice, as it is or in gzip: what
`--xla_dump_to` leaves, what jax's `compiled.as_text()` gives, or `optimised.hlo.gz` in a folder under `compiled` in the
cache, where compile.py leaves its own. Nothing is compiled here. The same code counts it as compile.py's report.

The mesh says where the chips of a collective stand. Its axes multiply to all chips, the outermost first, and a device's
number in the text is its position in it. Model FLOPs are those of the model of that config on these rows, as MFU counts
them, whatever the program computes.
"""

import gzip
import json
import math
import os
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# transformers must not import torch_xla, which takes seconds and opens a device
os.environ["USE_TORCH_XLA"] = "0"

import numpy as np
from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.compile.report.report import CompileReport, Expected, make_report
from shardwright.compile.report.summary import SHARES_HEADER, estimate_line, fact_rows, share_rows, where_it_runs
from shardwright.errors import UserError
from shardwright.hosts.output_streams import exit_code
from shardwright.layout.auto import UNMADE
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config
from shardwright.report.lines import say, say_table
from shardwright.report.units import size
from shardwright.xla.chips import find_topology

_GZIP = b"\x1f\x8b"
# the memory figures of a compiling process, which the text does not have
_UNTOLD = ("argument", "output", "alias", "temp", "generated_code", "peak", "host_temp", "host_argument")
_FACTS = ("FLOPs", "sent by a chip", "not in FLOPs and cycles", "depends on data")


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("module", type=Path, help="file of the optimised module's text")
    parser.add_argument("--topology", required=True, help="TPU slice that it was compiled for: v5p:4x4x4, …")
    parser.add_argument("--slices", type=int, default=1, help="slices of that topology (default: 1)")
    parser.add_argument("--mesh", required=True, help="axis=size,…, outermost first: fsdp=16,expert=4")
    parser.add_argument("--dcn", default="", help="axis=slices,…: how many slices an axis spans (default: one each)")
    parser.add_argument("--rows", type=int, help="sequences of a step, on all chips")
    parser.add_argument("--sequence_length", type=int, help="tokens of a sequence")
    parser.add_argument("--model", help="hub id, folder, or config.json, for the model FLOPs")
    parser.add_argument(
        "--layers", type=int, default=1, help="turns of an outermost loop of untold length (default: 1)"
    )
    parser.add_argument("--efficiency", default="", help="as scripts/compile.py takes it")
    parser.add_argument("--json", metavar="FILE", help="write the estimate, and each collective, to this file")
    words = parser.parse_args()

    if bool(words.rows) != bool(words.sequence_length):
        parser.error("--rows and --sequence_length come together: they are a step's tokens")
    if words.model and not words.rows:
        parser.error("--model needs --rows and --sequence_length: its FLOPs are those of a step's tokens")
    flops = None
    if words.model:
        flops = facts_of(load_config(words.model, UNMADE)).training_flops(words.rows, words.sequence_length)
    tokens = words.rows * words.sequence_length if words.rows else None
    expected = Expected(model_flops=flops, tokens=tokens, efficiency=words.efficiency)
    module, mesh, dcn = read_module(words.module), axes(words.mesh), axes(words.dcn)
    report = count_module(module, words.topology, mesh, expected, slices=words.slices, dcn=dcn, layers=words.layers)
    console = Console()
    _print(report, console)
    if words.json:
        plain = report.as_json()
        told = ("topology", "slices", "mesh", "model_flops", "flops", "hbm_bytes", "loops", "kernels", "collectives")
        counted = {name: plain[name] for name in ("estimate", *told)}
        Path(words.json).write_text(json.dumps(counted, indent=2) + "\n", encoding="utf-8")
        say(console, f"json:    {words.json}")


def read_module(path: Path) -> str:
    """The text of a file, perhaps in gzip; raises UserError if there is none."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if data.startswith(_GZIP) else data).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise UserError(
            asked=f"the module in {path}",
            found=f"{type(error).__name__}: {error}",
            why="what is counted is the text of a compiled module",
            instead="a file of optimised HLO text, as it is or in gzip",
        ) from error


def axes(text: str) -> dict[str, int]:
    """Axis → number, from ``fsdp=16,expert=4``; raises UserError for other text."""
    pairs = [re.fullmatch(r"\s*(\w+)=([1-9]\d{0,8})\s*", word) for word in filter(None, text.split(","))]
    if not all(pairs):
        raise UserError(
            asked=f"the axes {text!r}",
            found="not axis=number,…",
            why="each axis of a mesh has a name and a size",
            instead="fsdp=16,expert=4",
        )
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def count_module(
    hlo: str,
    topology: str,
    mesh: dict[str, int],
    expected: Expected,
    *,
    slices: int = 1,
    dcn: Mapping[str, int] | None = None,
    layers: int = 1,
) -> CompileReport:
    """The report on a module's text, without memory, which the text does not tell.

    ``mesh``: axis → size, outermost first; ``dcn``: axis → slices that it spans; ``layers``: the turns of outermost
    loops for which the text tells none. Raises UserError if topology, mesh and module have other numbers of chips.
    """
    where, factors = find_topology(topology, slices), dict(dcn or {})
    head = hlo[: hlo.find("\n")]
    partitions = re.search(r"num_partitions=(\d+)", head)
    compiled_for, chips = int(partitions[1]) if partitions else 1, math.prod(mesh.values())
    found = ""
    if not head.startswith("HloModule") or "is_scheduled=true" not in head:
        found = "no text of a scheduled HloModule"
    elif chips != where.devices:
        found = f"a mesh of {chips} chips: {mesh}"
    elif compiled_for != where.devices:
        found = f"a module compiled for {compiled_for} chips"
    elif math.prod(factors.values()) != slices or any(mesh.get(axis, 0) % n for axis, n in factors.items()):
        found = f"axes over slices: {factors}"
    if found:
        raise UserError(
            asked=f"a count of a module for {where.devices} chips, in {slices} slices",
            found=found,
            why="collectives take the time that their chips' places on the torus give them",
            instead="the optimised module of all those chips, their --topology and --slices, a --mesh of as many, and "
            "--dcn where there are several slices",
        )
    lowered = LoweredGraph(hlo=b"", arguments=(), outputs=(), mesh=mesh, layers=layers)
    result = dict.fromkeys(_UNTOLD, 0) | {"cpu_seconds": 0.0, "wall_seconds": 0.0}
    return make_report(lowered, where, result, hlo, "", expected, dcn)


def _print(report: CompileReport, console: Console) -> None:
    say(console, where_it_runs(report))
    say(console, estimate_line(report))
    whole = report.estimate.seconds
    shares = [(cause, f"{seconds:,.4f}", f"{seconds / whole:.1%}") for cause, seconds in share_rows(report)]
    say_table(console, SHARES_HEADER[:3], shares)
    for name, text in fact_rows(report):
        if name in _FACTS:
            say(console, f"{name}: {text}")
    totals: dict[tuple[str, str], Any] = {}
    for line in report.collectives:
        moved = np.array([line.count, line.bytes, line.wire_bytes, line.exposed_bytes], dtype=float)
        totals[line.kind, line.axis] = totals.get((line.kind, line.axis), 0) + moved
    ordered = sorted(totals.items(), key=lambda item: -item[1][2])
    rows = [(*key, f"{count:,.0f}", *map(size, moved)) for key, (count, *moved) in ordered]
    say_table(console, ("collective", "axis", "a step", "bytes", "sent", "exposed"), rows)


if __name__ == "__main__":
    sys.exit(exit_code(main))
