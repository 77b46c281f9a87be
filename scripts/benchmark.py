"""Speed on this machine, side by side in one run; every worker is a process of its own, and rounds alternate.

python scripts/benchmark.py speed      our step on 8 virtual CPU devices against transformers' Trainer on the plain CPU
python scripts/benchmark.py depth      trace and compile time at 2, 8 and 32 layers, with the scan and without
python scripts/benchmark.py threads    threads of XLA's CPU client against cores kept busy
python scripts/benchmark.py load       a hub checkpoint onto the devices against a plain read of its files; peak memory
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.errors import exit_code

SPEED = {"sequence_length": 256, "rows": 16, "steps": 12, "warmup": 3}
DEPTH = {"sequence_length": 64, "rows": 8, "steps": 8, "warmup": 2, "hidden_size": 64, "intermediate_size": 128}
# largest fused parameter: gate and up of a layer's experts, 32 MiB of 503 MiB
LOAD = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}
PIECE = 16 << 20  # bytes of a plain read
STARVED = "starved: aborted"  # XLA ends the process when a collective waits for 10 s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["speed", "depth", "threads", "load", "worker"], help="which table to print")
    parser.add_argument("--recipe", default="mixtral_ep", help="recipe whose default model is measured (mixtral_ep)")
    parser.add_argument("--rounds", type=int, default=3, help="alternating rounds; medians are reported (3)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "worker":
        job = json.loads(args.job)
        print(json.dumps(SIDES[job["side"]](job)))
        return 0
    table = {"speed": speed, "depth": depth, "threads": threads, "load": load}[args.what](args.recipe, args.rounds)
    Console(width=140).print(table)
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
    for side, name in (
        ("ours", "this trainer, 8 virtual CPU devices"),
        ("theirs", "transformers' Trainer, plain CPU, eager"),
    ):
        rate = medians[side]["tokens_per_second"]
        table.add_row(name, f"{rate:,.0f}", f"{medians[side]['cores']:.2f}", f"{rate / base:.2f}")
    return table


def depth(recipe: str, rounds: int) -> Table:
    """How tracing and compiling grow with the number of layers."""
    table = Table("layers", "scan", "first step (trace + compile)", "trace a step", title=f"{recipe}, hidden size 64")
    for layers in (2, 8, 32):
        for scan in (True, False):
            result = worker(recipe, {"side": "ours", "num_hidden_layers": layers, "scan": scan, **DEPTH})
            first, trace = f"{result['first']:.1f} s", f"{result['trace'] * 1000:.0f} ms"
            table.add_row(str(layers), "yes" if scan else "no", first, trace)
    return table


def threads(recipe: str, rounds: int) -> Table:
    """NPROC sizes the thread pools of XLA's CPU client; the trainer sets it unless the user did."""
    concurrent = "--xla_cpu_enable_concurrency_optimized_scheduler=true --xla_cpu_multi_thread_eigen=true"
    settings: dict[str, dict[str, str]] = {
        "XLA's default: a thread a core": {"NPROC": str(os.cpu_count()), "XLA_FLAGS": concurrent},
        "a thread a device": {"NPROC": "8", "XLA_FLAGS": concurrent},
        "4 threads a device": {"NPROC": "32", "XLA_FLAGS": concurrent},
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


def load(recipe: str, rounds: int) -> Table:
    """Bytes/s of opening and placing a checkpoint and of reading its files, alternating; and what the host held."""
    import tempfile

    rows: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        job = {"side": "load", "folder": folder, **LOAD}
        worker(recipe, {**job, "side": "make checkpoint"})
        size = sum(os.path.getsize(file) for file in _weight_files(folder))
        for _ in range(rounds):
            for cold in (True, False):
                state = "from the disk" if cold else "from the page cache"
                result = worker(recipe, {**job, "cold": cold})
                rows.setdefault(f"plain read, {state}", []).append(_plain_read(folder, cold))
                rows.setdefault(f"onto 8 devices, {state}", []).append(tuple(result["again"]))
                rows.setdefault(f"the first time, with compiles, {state}", []).append(tuple(result["first"]))
        memory = worker(recipe, {**job, "side": "load memory"})
    medians = {name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in rows.items()}
    mib = {name: count / 2**20 for name, count in memory.items()}
    table = Table(
        "",
        "MB/s",
        "ratio",
        "CPU s",
        title=f"{size / 1e6:,.0f} MB of {recipe}'s family, {LOAD['num_hidden_layers']} layers",
        caption=f"host memory beyond what the devices hold: peak {mib['beyond']:.0f} MiB; largest fused parameter "
        f"{mib['largest']:.0f} MiB of {mib['total']:.0f}",
    )
    for name, (wall, cpu) in sorted(medians.items(), key=lambda row: row[0].split(", ")[-1]):
        base, _ = medians["plain read, " + name.split(", ")[-1]]
        table.add_row(name, f"{size / wall / 1e6:,.0f}", f"{base / wall:.2f}", f"{cpu:.2f}")
    return table


def worker(recipe: str, job: dict[str, Any], environment: dict[str, str] | None = None) -> dict[str, Any]:
    """One measurement in a fresh process; an empty dict if XLA aborted it."""
    command = [sys.executable, __file__, "worker", "--job", json.dumps({"recipe": recipe, **job})]
    variables = dict(os.environ) | {"TF_CPP_MIN_LOG_LEVEL": "3"} | (environment or {})
    if job["side"] == "theirs":
        variables["USE_TORCH_XLA"] = "0"
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode == -6:
        return {}
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measured(job: dict[str, Any], steps: list[tuple[float, float, float]]) -> dict[str, float]:
    """(wall, CPU, trace) seconds of each step → medians after the warm-up."""
    later = steps[job["warmup"] :]
    wall, cpu, trace = (statistics.median(column) for column in zip(*later, strict=True))
    tokens = job["rows"] * job["sequence_length"]
    return {"tokens_per_second": tokens / wall, "cores": cpu / wall, "trace": trace, "first": steps[0][0]}


def model_config(job: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    from trainer.recipe import load_recipe

    changes: dict[str, Any] = {k: job[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size") if k in job}
    return AutoConfig.for_model(**dict(load_recipe(job["recipe"]).model or {}) | changes)


def random_rows(job: dict[str, Any], vocab_size: int) -> Any:
    import datasets
    import torch

    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (job["rows"], job["sequence_length"]), generator=generator)
    return datasets.Dataset.from_dict({"input_ids": tokens.tolist()})


def ours(job: dict[str, Any]) -> dict[str, float]:
    """Our step, as the trainer builds it."""
    from dataclasses import replace

    import torch
    from transformers import PreTrainedTokenizerFast

    from trainer.arguments import TrainingArguments
    from trainer.data import Corpus
    from trainer.mesh import init_runtime
    from trainer.recipe import load_recipe
    from trainer.trainer import Trainer

    init_runtime()
    import torch_xla.core.xla_model as xm

    recipe = load_recipe(job["recipe"])
    recipe = replace(recipe, compute=replace(recipe.compute, scan=job.get("scan", True)))
    config = model_config(job)
    rows = random_rows(job, config.vocab_size)
    args = TrainingArguments(
        recipe=job["recipe"],
        sequence_length=job["sequence_length"],
        per_device_train_batch_size=job["rows"] // 8,
        max_steps=job["steps"],
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=_empty_tokenizer())
    trainer = Trainer(recipe, args, config, Corpus(rows, rows, tokenizer))
    ids = torch.tensor(rows["input_ids"][:])
    steps = []
    for step in range(1, job["steps"] + 1):
        wall, cpu = time.perf_counter(), time.process_time()
        trainer.train_step({"input_ids": ids, "labels": ids}, step=step, learning_rate=1e-4)
        trace = time.perf_counter() - wall
        xm.wait_device_ops()
        steps.append((time.perf_counter() - wall, time.process_time() - cpu, trace))
    return measured(job, steps)


def theirs(job: dict[str, Any]) -> dict[str, float]:
    """transformers' Trainer on the plain CPU: the same model, batch, optimizer and clipping."""
    import tempfile

    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments, default_data_collator

    config = model_config(job)
    model = AutoModelForCausalLM.from_config(config)
    rows = random_rows(job, config.vocab_size).map(lambda row: {"labels": row["input_ids"]})
    steps: list[tuple[float, float, float]] = []

    class Clock(TrainerCallback):
        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.started = time.perf_counter(), time.process_time()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            wall, cpu = self.started
            steps.append((time.perf_counter() - wall, time.process_time() - cpu, 0.0))

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
    return measured(job, steps)


def make_checkpoint(job: dict[str, Any]) -> dict[str, float]:
    """A random model in the hub's format, in files of 200 MB."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config(job))
    model.save_pretrained(job["folder"], max_shard_size="200MB")
    return {}


def load_rate(job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds to open a checkpoint and place it, with its compiles and again without."""
    import torch_xla.core.xla_model as xm

    fresh = _placing(job)
    seconds = []
    for _ in range(2):
        _, place = fresh()
        if job["cold"]:
            _evict(job["folder"])
        started = time.perf_counter(), time.process_time()
        placed = place()
        xm.wait_device_ops()
        seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))
        del placed, place
    return {"first": seconds[0], "again": seconds[1]}


def load_memory(job: dict[str, Any]) -> dict[str, float]:
    """Bytes of the host that loading held at its peak beyond those of the (virtual) devices, which lie in it too.

    Anonymous memory, seen from another process; pages of the mapped files count as resident too, but are the page
    cache's, which gives way. ``whole``: all of it is read first, as transformers' loader does.
    """
    import math

    from transformers import AutoModelForCausalLM

    from trainer import weights

    plan, place = _placing(job)()
    before = _anonymous(os.getpid())
    with subprocess.Popen(
        [sys.executable, __file__, "worker", "--job", json.dumps({"side": "watch", "process": os.getpid()})],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as watch:
        assert watch.stdin is not None
        assert watch.stdout is not None
        watch.stdout.readline()  # it looks
        if job.get("whole"):
            state = AutoModelForCausalLM.from_pretrained(job["folder"]).state_dict()
            placed = place(weights.state_dict_weights(state))
        else:
            placed = place()
        peak = json.loads(watch.communicate("done")[0].splitlines()[-1])["peak"]
    assert placed.keys() == {p.name for p in plan.parameters}
    copies = {p.name: plan.devices * p.bytes_per_device for p in plan.parameters}
    layer = [p.dtype.itemsize * math.prod(p.shape[1:] if ".*." in p.name else p.shape) for p in plan.parameters]
    total = sum(p.dtype.itemsize * math.prod(p.shape) for p in plan.parameters)
    return {"beyond": peak - before - sum(copies.values()), "largest": max(layer), "total": total}


def watch_memory(job: dict[str, Any]) -> dict[str, float]:
    """The most anonymous memory that a process has until a line comes in."""
    import select

    print("looking", flush=True)
    peak = 0
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        peak = max(peak, _anonymous(job["process"]))
    return {"peak": peak}


def _placing(job: dict[str, Any]) -> Any:
    """() -> a new model's plan, and what places its parameters (default: from the checkpoint in the job's folder)."""
    from trainer import hub, weights
    from trainer.assembly import assemble
    from trainer.mesh import build_mesh, init_runtime
    from trainer.model import load_config, meta_model
    from trainer.plan import make_plan
    from trainer.recipe import load_recipe

    init_runtime()
    recipe = load_recipe(job["recipe"])
    config = load_config(job["folder"], recipe)
    mesh, plain = build_mesh(recipe.mesh), meta_model(config)
    plain_plan = make_plan(recipe, plain, 8)

    def fresh() -> Any:
        model, plan = assemble(recipe, plain_plan, config, mesh)

        def place(source: weights.Source | None = None) -> Any:
            return weights.place_parameters(model, plan, mesh, source or hub.open_checkpoint(job["folder"], plain))

        return plan, place

    return fresh


def _weight_files(folder: str) -> list[str]:
    return [entry.path for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]


def _plain_read(folder: str, cold: bool) -> tuple[float, float]:
    """(wall, CPU) seconds to read the weight files into a buffer."""
    if cold:
        _evict(folder)
    buffer = bytearray(PIECE)
    started = time.perf_counter(), time.process_time()
    for path in _weight_files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - started[0], time.process_time() - started[1]


def _evict(folder: str) -> None:
    """Let go of the files' pages in the page cache."""
    for path in _weight_files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)  # only what is on the disk can go
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _anonymous(process: int) -> int:
    """Bytes of a process's memory that no file backs."""
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


SIDES = {
    "ours": ours,
    "theirs": theirs,
    "make checkpoint": make_checkpoint,
    "load": load_rate,
    "load memory": load_memory,
    "watch": watch_memory,
}


def _empty_tokenizer() -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.BPE())


if __name__ == "__main__":
    sys.exit(exit_code(main))
