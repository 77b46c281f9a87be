"""The estimate of a step's time beside times that were published: MaxText's, for steps that can be compiled here.

python scripts/measure/step_times.py             # minutes to an hour of CPU (docs/records/tpu)

Each row is the same model, batch, sequence length and dtypes on the same kind of chip, with our recipe and kernels in
place of MaxText's; the last column says what differs. Published are tokens/s a chip; the seconds are those that our
step's tokens take at that rate. A last line sets the compiler's cycles for one large product
beside its published time.
"""

import os
import sys
from typing import NamedTuple

from rich.console import Console

from shardwright.arguments.command_line import Parser
from shardwright.compile.hlo.cost import count
from shardwright.compile.hlo.links import Links
from shardwright.compile.hlo.text import parse
from shardwright.compile.hlo.timeline import CAUSES
from shardwright.compile.report.estimate import ranged
from shardwright.hosts.output_streams import exit_code
from shardwright.report.lines import say, waiting
from shardwright.scripts.measure.tables import markdown
from shardwright.scripts.measure.tpu_rows import LLAMA8, step
from shardwright.scripts.measure.tpu_tables import Report, compile_one
from shardwright.xla.chips import find_topology


class PublishedStep(NamedTuple):
    """A step that was timed on TPUs, a chip's tokens in it, and the options of scripts/compile.py for our step."""

    options: str
    tokens_per_second: float  # a chip's
    tokens: int
    source: str
    differs: str


_TOKENS = "bos_token_id=1,eos_token_id=2"
_TIERING = "MaxText docs/reference/models/tiering.md (e591f30)"
_TRILLIUM = "tpu-recipes training/trillium/Llama3.1-8B-MaxText/v6e-8 (c8cfe2f)"
_TRILLIUM_MIXTRAL = "tpu-recipes training/trillium/Mixtral-8x7B-MaxText (a50d68e), which names MaxText e7292a3"
_V6E = step("llama_fsdp", f"{LLAMA8},{_TOKENS}", "v6e:2x4", 3, length=8192)
_VMEM = "--compiler_options xla_tpu_scoped_vmem_limit_kib="
ROWS = {
    "Mixtral-8x7B, dropless, 36 × 4,096, v5p:4x4x8": PublishedStep(
        step("mixtral_fsdp", "mixtral_8x7b", "v5p:4x4x8", 36, "--weight_dtype bfloat16 --optimizer_dtype bfloat16"),
        2909,
        36 * 4096,
        f"{_TIERING}; tpu-recipes training/v5p/Mixtral-8X7B-Maxtext",
        "nothing that is told: full remat, bfloat16 state",
    ),
    "Llama-2-70B, 2 × 4,096, v5p:4x4x4": PublishedStep(
        step("llama_fsdp", f"llama3_70b,{_TOKENS},vocab_size=32000", "v5p:4x4x4", 2),
        692,
        2 * 4096,
        f"{_TIERING}; llama2_70b_v5p_128 in benchmarks/maxtext_v5p_model_configs.py (92e59fd)",
        "full remat, 2 sequences a chip on 64; theirs keeps all products but two of the MLP, 4 on 512",
    ),
    "Llama-3.1-8B, 3 × 8,192, v6e:2x4": PublishedStep(
        f"{_V6E} {_VMEM}98304",
        7138.89,
        3 * 8192,
        _TRILLIUM,
        "full remat; theirs keeps q, k, v and o on the host. Attention in blocks of 1,024 and two backward kernels; "
        "theirs 2,048 and one",
    ),
    "the same without the VMEM that theirs gives a fusion": PublishedStep(
        _V6E, 7138.89, 3 * 8192, _TRILLIUM, "as the row above, and the flags that a run here sets on v6e"
    ),
    "Mixtral-8x7B, capacity 1.25, 8 × 4,096, v6e:16x16": PublishedStep(
        step("mixtral_fsdp", "mixtral_8x7b", "v6e:16x16", 8, "--mesh fsdp=16,inner=16", f"{_VMEM}81920")
        + " --compute experts=capacity,capacity_factor=1.25",
        3896.752,
        8 * 4096,
        _TRILLIUM_MIXTRAL,
        "a mesh axis for each dimension of the torus, theirs one for both; full remat and 80 MiB, as theirs",
    ),
}
_PRODUCT = 8192
_PRODUCT_SECONDS = 0.006047147869830951  # docs.jax.dev/en/latest/pallas/tpu/matmul.html, "XLA matmul", v5e


def main() -> int:
    parser = Parser(__doc__)
    parser.add_argument("--efficiency", default="", help="as compile.py takes it")
    arguments = parser.parse_args()
    console, rows = Console(stderr=True), []
    given = f" --efficiency {arguments.efficiency}" if arguments.efficiency else ""
    for name, published in ROWS.items():
        with waiting(console, f"compiling {name} …"):
            report = compile_one(f"{published.options} --only_train_step{given}")
        say(console, f"{name}: {report.get('failed') or 'done'}")
        rows.append([name, *_cells(published, report)])
    header = ["", "published, s", "estimated", "error", "MFU published", "estimated", "time goes to", "differs"]
    print(markdown(header, rows))
    print("\n" + "\n".join(f"- {name}: {published.source}" for name, published in ROWS.items()), flush=True)
    seconds = _product_cycles() / find_topology("v5e:1x1").chip.clock
    print(
        f"\nA product of {_PRODUCT:,}³ on v5e: published {_PRODUCT_SECONDS * 1e3:.2f} ms, by the compiler's cycles "
        f"{seconds * 1e3:.2f} ms ({seconds / _PRODUCT_SECONDS - 1:+.1%})"
    )
    return 0


def _cells(published: PublishedStep, report: Report) -> list[str]:
    seconds = published.tokens / published.tokens_per_second
    if "failed" in report:
        return [f"{seconds:.2f}", report["failed"], *[""] * 5]
    found = report["estimate"]
    peak = find_topology(report["topology"]).chip.flops
    shares = sorted(found["shares"].items(), key=lambda share: -share[1])
    return [
        f"{seconds:.2f}",
        ranged(found["seconds"], (found["fastest"], found["slowest"]), ".2f"),
        f"{found['seconds'] / seconds - 1:+.1%}",
        f"{report['model_flops'] / peak / seconds:.1%}",
        f"{found['mfu']:.1%}",
        "; ".join(f"{CAUSES[cause]} {part / found['seconds']:.0%}" for cause, part in shares if part),
        published.differs,
    ]


def _product_cycles() -> float:
    """The compiler's estimated cycles for one bfloat16 product on a v5e chip."""
    # libtpu without a TPU, as in shardwright.compile.libtpu
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_ACCELERATOR_TYPE": "v5p-8"}
    os.environ |= {"JAX_PLATFORMS": "cpu", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    import jax
    import numpy as np
    from jax.experimental import topologies

    name, options = find_topology("v5e:1x1").libtpu()
    chips = topologies.get_topology_desc(topology_name=name, platform="tpu", **options).devices
    mesh = jax.sharding.Mesh(np.array(chips), ("x",))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    matrix = jax.ShapeDtypeStruct((_PRODUCT, _PRODUCT), "bfloat16", sharding=whole)
    text = jax.jit(jax.numpy.matmul).lower(matrix, matrix).compile().as_text() or ""
    return count(parse(text), {"x": 1}, 1, Links(find_topology("v5e:1x1"), (1,), (1,))).cycles


if __name__ == "__main__":
    sys.exit(exit_code(main))
