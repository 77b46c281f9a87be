"""Prints a table of speeds, measured on this machine side by side.

python scripts/measure/speed.py speed      our step on 8 virtual CPU devices, and transformers' Trainer on the plain CPU
python scripts/measure/speed.py depth      time to trace and to compile 2, 8 and 32 layers, with the scan and without
python scripts/measure/speed.py busy       the same two, alone and beside four processes that never wait
python scripts/measure/speed.py devices    the same batch on 1, 2, 4 and 8 virtual devices, with remat and without
python scripts/measure/speed.py threads    how the number of XLA's CPU threads changes speed and cores kept busy
python scripts/measure/speed.py products   what a product of an expert's tile costs by the number of these threads

Each measurement is a process of its own. The sides of a table take turns, round by round; it shows the medians.
docs/numbers.md has the tables as they were on one machine. Reading and writing files: scripts/measure/files.py.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code

SPEED = {"sequence_length": 256, "rows": 16, "steps": 12, "warmup": 3}
DEPTH = {"sequence_length": 64, "rows": 8, "steps": 8, "warmup": 6, "hidden_size": 64, "intermediate_size": 128}
SIDES = {"ours": "this trainer, 8 virtual CPU devices", "theirs": "transformers' Trainer, plain CPU, eager"}
DEVICES = (1, 2, 4, 8)  # virtual ones
BUSY = 4  # processes that never wait
PRODUCTS = ((128, 512, 128), (512, 512, 128), (512, 2048, 128))  # rows, columns, and what is summed over
# tiles of 6 rows and 2 vectors; options of XLA that it calls experimental
_OWN_PRODUCTS = "xla_force_enable_experimental_llvm_ir_gemm,xla_llvm_ir_gemm_tile_size=6:4:2*vectwidth"
STARVED = "starved: aborted"  # XLA aborts the process if a collective waits for 10 s


def main() -> int:
    tables = {"speed": speed, "depth": depth, "busy": busy, "devices": devices, "threads": threads}
    sides = {"ours": ours, "theirs": theirs, "product": product}
    return run(tables | {"products": products}, sides, str(__doc__))


def run(
    tables: Mapping[str, Callable[[str, int], Table]], sides: Mapping[str, Callable[[Any], Any]], description: str
) -> int:
    """Prints the table that the command line asks for; or, as a worker process, what it measured, as JSON.

    Args:
        tables: name → function of (recipe, rounds) that makes the table.
        sides: name → what a worker runs; it takes the job.
        description: for ``--help``.
    """
    parser = Parser(description)
    names = "{" + ",".join(tables) + "}"
    parser.add_argument("what", choices=[*tables, "worker"], metavar=names, help="the table to print")
    parser.add_argument("--recipe", default="mixtral_ep", help="the recipe whose own small model runs (mixtral_ep)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured (3)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "worker":
        job = json.loads(args.job)
        print(json.dumps(sides[job["side"]](job)))
        return 0
    Console(width=140).print(tables[args.what](args.recipe, args.rounds))
    return 0


def speed(recipe: str, rounds: int) -> Table:
    """Tokens/s of both sides on the same model and batch; the ratio is of medians."""
    found: dict[str, list[dict[str, Any]]] = {"ours": [], "theirs": []}
    for _ in range(rounds):
        for side, results in found.items():
            results.append(worker(recipe, {"side": side, **SPEED}))
    medians = {
        side: {k: statistics.median(r[k] for r in results) for k in results[0]} for side, results in found.items()
    }
    table = Table(
        "", "tokens/s", "cores busy", "ratio", title=f"{recipe}, {SPEED['rows']} rows of {SPEED['sequence_length']}"
    )
    base = medians["theirs"]["tokens_per_second"]
    for side, name in SIDES.items():
        rate = medians[side]["tokens_per_second"]
        table.add_row(name, f"{rate:,.0f}", f"{medians[side]['cores']:.2f}", f"{rate / base:.2f}")
    return table


def depth(recipe: str, rounds: int) -> Table:
    """How the time to trace and to compile grows with the number of layers; measured once, whatever ``rounds``."""
    table = Table("layers", "scan", "first step (trace + compile)", "trace a step", title=f"{recipe}, hidden size 64")
    for layers in (2, 8, 32):
        for scan in (True, False):
            result = worker(recipe, {"side": "ours", "num_hidden_layers": layers, "scan": scan, **DEPTH})
            first, trace = f"{result['first']:.1f} s", f"{result['trace'] * 1000:.0f} ms"
            table.add_row(str(layers), "yes" if scan else "no", first, trace)
    return table


def busy(recipe: str, rounds: int) -> Table:
    """Seconds a step of both sides, alone and beside processes that never wait; medians, and how they compare.

    In proportion would be (cores + BUSY) / cores: as if a process ran on each core, and the cores were shared evenly.
    """
    found: dict[tuple[str, int], list[float]] = {(side, load): [] for side in SIDES for load in (0, BUSY)}
    for _ in range(rounds):
        for (side, load), seconds in found.items():
            with busy_neighbours(load):
                result = worker(recipe, {"side": side, **SPEED})
            if not result:
                raise RuntimeError(f"a worker beside {load} busy processes {STARVED}")
            seconds.append(SPEED["rows"] * SPEED["sequence_length"] / result["tokens_per_second"])
    title = f"{recipe}, {SPEED['rows']} rows of {SPEED['sequence_length']}, {os.cpu_count()} cores"
    table = Table("", "a step alone", f"beside {BUSY} busy processes", "times as long", title=title)
    for side, name in SIDES.items():
        alone, beside = (statistics.median(found[side, load]) for load in (0, BUSY))
        table.add_row(name, f"{alone:.2f} s", f"{beside:.2f} s", f"{beside / alone:.1f}")
    return table


@contextlib.contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Inside, ``count`` processes run that never wait."""
    neighbours = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for neighbour in neighbours:
            neighbour.kill()
            neighbour.wait()


def devices(recipe: str, rounds: int) -> Table:
    """Tokens/s of one global batch by the number of virtual devices; the ratio is to transformers' Trainer.

    The recipe's remat computes each layer's forward twice, which the Trainer does not: so both are shown.
    """
    sides: dict[str, tuple[dict[str, Any], dict[str, str]]] = {"theirs": ({"side": "theirs"}, {})}
    for count in DEVICES:
        for remat in ("full", "none"):
            job = {"side": "ours", "devices": count, "remat": remat}
            sides[f"{count} devices, remat={remat}"] = job, {"CPU_NUM_DEVICES": str(count)}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, (job, environment) in sides.items():
            found[name].append(worker(recipe, {**job, **SPEED}, environment))
    rates = {name: statistics.median(r["tokens_per_second"] for r in results) for name, results in found.items()}
    title = f"{recipe}, {SPEED['rows']} rows of {SPEED['sequence_length']}, {os.cpu_count()} cores"
    table = Table("", "tokens/s", "cores busy", "ratio", title=title, box=box.MARKDOWN)
    for name, rate in rates.items():
        cores = statistics.median(r["cores"] for r in found[name])
        table.add_row(SIDES.get(name, name), f"{rate:,.0f}", f"{cores:.2f}", f"{rate / rates['theirs']:.2f}")
    return table


def threads(recipe: str, rounds: int) -> Table:
    """Tokens/s for several sizes of the CPU client's thread pools: NPROC, which the trainer sets if nobody did."""
    concurrent = "--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_cpu_multi_thread_eigen=true"
    settings: dict[str, dict[str, str]] = {
        "XLA's default: a thread a core": {"NPROC": str(os.cpu_count()), "XLA_FLAGS": concurrent},
        "a thread a device": {"NPROC": "8", "XLA_FLAGS": concurrent},
        "4 threads a device": {"NPROC": "32", "XLA_FLAGS": concurrent},
        "4 threads a device, one op at a time": {"NPROC": "32"},
        "the trainer's: a thread a device, one op at a time": {},
    }
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, environment in settings.items():
            found[name].append(worker(recipe, {"side": "ours", **SPEED}, environment))
    table = Table("threads", "tokens/s", "cores busy", title=f"{recipe}, 8 virtual devices on {os.cpu_count()} cores")
    for name, results in found.items():
        good = [result for result in results if result]
        starved = f" ({len(results) - len(good)} of {len(results)} {STARVED})" if len(good) < len(results) else ""
        rate = f"{statistics.median(r['tokens_per_second'] for r in good):,.0f}" if good else "-"
        cores = f"{statistics.median(r['cores'] for r in good):.2f}" if good else "-"
        table.add_row(name, rate + starved, cores)
    return table


def products(recipe: str, rounds: int) -> Table:
    """FLOPs that a CPU second does of one product, by the threads over which XLA's CPU client splits it.

    The client has no fewer threads than devices. In a run all devices are at work, and a thread that a product could be
    split over has one of its own to do.
    """
    every = "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=8"
    own = f"--xla_cpu_multi_thread_eigen=false --xla_backend_extra_options={_OWN_PRODUCTS}"
    conv = "8 threads, eight devices at work, as a convolution, which nothing splits"
    settings = {
        "1 thread": {"NPROC": "1"},
        "2 threads": {"NPROC": "2"},
        "8 threads, one device at work": {"NPROC": "8"},
        "8 threads, eight devices at work, as in a run": {"NPROC": "8", "XLA_FLAGS": every},
        conv: {"NPROC": "8", "XLA_FLAGS": every},
        "8 threads, XLA's own product, which nothing splits": {"NPROC": "8", "XLA_FLAGS": own},
    }
    table = Table("", *("×".join(map(str, shape)) for shape in PRODUCTS), title="GFLOP a CPU second", box=box.MARKDOWN)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    for _ in range(rounds):
        for name, environment in settings.items():
            job = {"side": "product", "convolution": name == conv}
            found[name].append(worker(recipe, job, {"JAX_PLATFORMS": "cpu", **environment}))
    for name, results in found.items():
        table.add_row(name, *(f"{statistics.median(r[str(shape)] for r in results):.1f}" for shape in PRODUCTS))
    return table


def worker(
    recipe: str, job: dict[str, Any], environment: dict[str, str] | None = None, script: str = __file__
) -> dict[str, Any]:
    """One measurement, in a process of its own; an empty dict if XLA aborted the process."""
    command = [sys.executable, script, "worker", "--job", json.dumps({"recipe": recipe, **job})]
    variables = dict(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"} | (environment or {})
    if job["side"] == "theirs":
        variables["USE_TORCH_XLA"] = "0"
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode == -signal.SIGABRT:
        return {}
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(job: dict[str, Any], wall: float, cpu: float, **more: float) -> dict[str, float]:
    """A worker's result, from wall and CPU seconds of a step after the warm-up."""
    return {"tokens_per_second": job["rows"] * job["sequence_length"] / wall, "cores": cpu / wall, **more}


def model_config(job: dict[str, Any]) -> Any:
    """The config of the recipe's own model, with the sizes that the job names."""
    from transformers import AutoConfig

    from shardwright.layout.load_recipe import load_recipe

    changes: dict[str, Any] = {k: job[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size") if k in job}
    return AutoConfig.for_model(**dict(load_recipe(job["recipe"]).model or {}) | changes)


def random_rows(job: dict[str, Any], vocab_size: int) -> Any:
    """A data set of as many rows of random tokens as the job names."""
    import datasets
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (job["rows"], job["sequence_length"]), generator=generator)
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist()})


def resolved_job(job: dict[str, Any], config: Any, **options: Any) -> Any:
    """The trainer's Job for the worker's: its recipe on ``config`` and the devices of this process."""
    from dataclasses import replace

    from shardwright.arguments.training import TrainingArguments
    from shardwright.job import Job
    from shardwright.layout.load_recipe import load_recipe
    from shardwright.layout.mesh import Mesh
    from shardwright.model.meta_model import meta_model
    from shardwright.xla.runtime import init_runtime

    init_runtime()
    recipe = load_recipe(job["recipe"])
    changes = {name: job[name] for name in ("scan", "remat") if name in job}
    count = job.get("devices", 8)
    # an axis longer than the devices are many takes them all
    mesh = Mesh(dcn=recipe.mesh.dcn, **{axis: min(size, count) for axis, size in recipe.mesh.axes.items()})
    recipe = replace(recipe, mesh=mesh, compute=replace(recipe.compute, **changes))
    return Job(recipe, TrainingArguments(recipe=job["recipe"], **options), count, config, meta_model(config))


def ours(job: dict[str, Any]) -> dict[str, float]:
    """The speed of our step, as the trainer builds it.

    After the warm-up nobody waits for the devices, as in a run: the host traces a step while they compute the last one.
    """
    import torch
    from transformers import PreTrainedTokenizerFast

    from shardwright.data.corpus import Corpus
    from shardwright.data.rows.rows import StoredRows
    from shardwright.loop import TrainingLoop
    from shardwright.xla.runtime import wait_for_devices

    config = model_config(job)
    rows = random_rows(job, config.vocab_size)
    options = {
        "sequence_length": job["sequence_length"],
        "per_device_train_batch_size": job["rows"] // job.get("devices", 8),
        "max_steps": job["steps"],
    }
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=empty_tokenizer())
    corpus = Corpus(StoredRows(rows), StoredRows(rows), tokenizer)
    trainer = TrainingLoop(resolved_job(job, config, **options), corpus)
    ids = torch.tensor(rows["input_ids"][:])

    def run(step: int) -> float:
        """The seconds that the host spends on it."""
        begun = time.perf_counter()
        trainer.train_step({"input_ids": ids, "labels": ids}, step=step, learning_rate=1e-4)
        return time.perf_counter() - begun

    begun, traces = time.perf_counter(), []
    for step in range(1, job["warmup"] + 1):
        traces.append(run(step))
        wait_for_devices()
        if step == 1:
            first = time.perf_counter() - begun
    wall, cpu, count = time.perf_counter(), time.process_time(), job["steps"] - job["warmup"]
    for step in range(job["warmup"] + 1, job["steps"] + 1):
        run(step)
    wait_for_devices()
    wall, cpu = (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
    return measured(job, wall, cpu, first=first, trace=statistics.median(traces[1:]))


def product(job: dict[str, Any]) -> dict[str, float]:
    """GFLOP a CPU second of products of matrices, one after the other in a loop that each device runs."""
    import jax

    from shardwright.models.ops import cpu_matmul

    multiply = cpu_matmul.product if job["convolution"] else jax.numpy.matmul
    rates, devices = {}, jax.devices()
    for m, n, k in PRODUCTS:
        matrices = [jax.numpy.ones(shape) for shape in ((m, k), (k, n), (m, n))]
        given = [jax.device_put(matrices, device) for device in devices]
        turns = max(1, 1_000_000_000 // (2 * m * n * k))

        @jax.jit
        def repeated(a: Any, b: Any, start: Any, turns: int = turns) -> Any:
            # the first operand depends on the turn before, or the product would leave the loop
            return jax.lax.fori_loop(0, turns, lambda _, c: multiply(a + 0 * c[:1, :1], b), start)

        jax.block_until_ready([repeated(*mine) for mine in given])
        seconds = []
        for _ in range(7):
            begun = time.process_time()
            jax.block_until_ready([repeated(*mine) for mine in given])
            seconds.append((time.process_time() - begun) / turns / len(devices))
        rates[str((m, n, k))] = 2 * m * n * k / statistics.median(seconds) / 1e9
    return rates


def theirs(job: dict[str, Any]) -> dict[str, float]:
    """The speed of transformers' Trainer on the plain CPU, with the same model, batch, optimizer and clipping."""
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    config = model_config(job)
    model = AutoModelForCausalLM.from_config(config)
    rows = random_rows(job, config.vocab_size).map(lambda row: {"labels": row["input_ids"]})
    steps: list[tuple[float, float]] = []

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.started = 0.0, 0.0

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wall, cpu = self.started
            steps.append((time.perf_counter() - wall, time.process_time() - cpu))

    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            per_device_train_batch_size=job["rows"],
            max_steps=job["steps"],
            learning_rate=1e-4,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        )
        if getattr(config, "router_aux_loss_coef", None):
            model.config.output_router_logits = True
        Trainer(model, args, train_dataset=rows, data_collator=default_data_collator, callbacks=[Clock()]).train()
    wall, cpu = (statistics.median(column) for column in zip(*steps[job["warmup"] :], strict=True))
    return measured(job, wall, cpu)


def empty_tokenizer() -> Any:
    """A tokenizer that knows no token: the rows are tokens already."""
    from tokenizers import Tokenizer
    from tokenizers.models import BPE

    return Tokenizer(BPE())


if __name__ == "__main__":
    sys.exit(exit_code(main))
