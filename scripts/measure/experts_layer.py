"""What the dropless experts of one layer of Mixtral-8x7B take on one chip, by the estimate. Compiled, not run.

python scripts/measure/experts_layer.py             # a minute or two of CPU; the table of docs/tpu.md
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

from rich.console import Console
from step_times import CAUSES, _environment, _markdown

from trainer.cli import Parser
from trainer.errors import exit_code
from trainer.report.lines import waiting
from trainer.xla.chips import CHIPS, find_topology

_EXPERTS, _CHOICES, _HIDDEN, _INNER = 8, 2, 4096, 14336
ROWS = {"forward": False, "backward": False, "forward, kept": True, "backward, kept": True}


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--chip", choices=[name for name in CHIPS if name in ("v5p", "v6e")], default="v5p")
    parser.add_argument("--tokens", type=int, default=12288, help="of the chip; they make one block (default: 12288)")
    parser.add_argument("--row", choices=ROWS, help="compile this one alone and print JSON")
    arguments = parser.parse_args()
    if arguments.row:
        print(json.dumps(_compiled(arguments.chip, arguments.tokens, arguments.row)))
        return 0
    header = ["", "ms", "time goes to", "temporaries, GiB"]
    rows = [header, ["---"] * len(header)]
    for row in ROWS:
        command = [sys.executable, __file__, "--chip", arguments.chip, "--tokens", str(arguments.tokens), "--row", row]
        with waiting(Console(stderr=True), f"compiling {row} …"):
            printed = subprocess.check_output(command, env=_environment() | {"PJRT_DEVICE": "CPU"})
        found = json.loads(printed.splitlines()[-1])
        shares = ", ".join(f"{CAUSES[cause]} {1e3 * seconds:.1f}" for cause, seconds in found["seconds"].items())
        rows.append([row, f"{1e3 * sum(found['seconds'].values()):.1f}", shares, f"{found['temporaries'] / 2**30:.1f}"])
    print(_markdown(rows))
    return 0


def _compiled(name: str, tokens: int, row: str) -> dict[str, Any]:
    """Seconds by cause, and bytes of temporaries."""
    import numpy as np
    import torch
    from jax._src.interpreters import mlir  # semi-private, jax 0.7.1: as in models.jax_call
    from jax.experimental import topologies

    from models.experts import activation, dropless_rows
    from models.jax_call import jax, lowering_for
    from trainer.compile.efficiency import efficiencies
    from trainer.compile.hlo.cost import Counter
    from trainer.compile.hlo.schedule import seconds_of
    from trainer.compile.hlo.text import parse

    chip = CHIPS[name]
    called, options = find_topology({"v5p": "v5p:2x2x1", "v6e": "v6e:1x1"}[name]).libtpu()
    device = topologies.get_topology_desc(topology_name=called, platform="tpu", **options).devices[0]
    where = jax.sharding.NamedSharding(jax.sharding.Mesh(np.array([device]), ("x",)), jax.sharding.PartitionSpec())

    def gated(h: torch.Tensor) -> torch.Tensor:
        gate, up = h.chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up

    local = dropless_rows.Local(
        activation=activation.trace(gated, 2 * _INNER),
        names=("gate_up_proj", "down_proj"),
        out_first=True,
        lora_scale=0.0,
        trained=(True, True),
        axes=(),
        expert_axes=(),
        expert_shards=1,
        specs=(((), (), ()),) * 2,
        buffer_bytes=2**31,
    )
    if ROWS[row]:
        local = replace(local, keep=True)

    def array(*shape: int, dtype: str = "bfloat16") -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    x = array(tokens, _HIDDEN)
    routing = [array(tokens, _CHOICES, dtype="int32"), array(tokens, _CHOICES), array(_EXPERTS, dtype="int32")]
    weights = [array(_EXPERTS, 2 * _INNER, _HIDDEN), array(_EXPERTS, _HIDDEN, _INNER)]
    backward = row.startswith("backward")
    arguments = [x, *([x] if backward else []), *routing, *weights]
    if backward and ROWS[row]:
        arguments.append(array(tokens * _CHOICES, 2 * _INNER))
    function = dropless_rows.backward if backward else dropless_rows.forward
    with lowering_for("tpu"):
        traced = jax.jit(lambda *given: function(*given, local=local)).trace(*arguments)
        private = mlir.LoweringParameters(for_export=True)
        lowered = traced.lower(lowering_platforms=("tpu",), _private_parameters=private)
    compiled = lowered.compile(compiler_options=dict(chip.missing_flags("")))
    counter = Counter(parse(compiled.as_text() or ""), {"x": 1}, 1, chip)
    memory: Any = compiled.memory_analysis()
    return {"seconds": seconds_of(counter, chip, efficiencies()), "temporaries": memory.temp_size_in_bytes}


if __name__ == "__main__":
    sys.exit(exit_code(main))
