"""Prints a table of what files cost, measured on this machine beside the least that could be done.

python scripts/measure/files.py load        loading a hub's weights onto 8 devices, plain and quantized, and plainly
                                            reading their files
python scripts/measure/files.py checkpoint  a checkpoint's pause and write, a plain copy and write of as many bytes, and
                                            torch.distributed.checkpoint's save of them

The sides of a table take turns, round by round; it shows the medians.
docs/records/speed.md has the tables as they were on one machine.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure import tables
from shardwright.scripts.measure.tables import model_config, resolved_job, run

# the largest fused parameter, gate and up of a layer's experts, is 32 MiB of 503 MiB
LOAD = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}
FORMS = ("float32", "FP8", "MXFP4")  # of a checkpoint's layers
PIECE = 16 << 20  # bytes of a plain read

worker = functools.partial(tables.worker, script=__file__)


def main() -> int:
    sides = {
        "make checkpoint": make_checkpoint,
        "load": load_rate,
        "load memory": load_memory,
        "watch": watch_memory,
        "saves": saves,
    }
    return run({"load": load, "checkpoint": checkpoint}, sides, str(__doc__))


def load(recipe: str, rounds: int) -> Table:
    """Bytes/s of loading weights and of plainly reading their files; and the host memory that loading took."""
    table = Table("", "MB/s", "ratio", "CPU s", title=f"{recipe}'s family, {LOAD['num_hidden_layers']} layers")
    said = []
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            job = {"side": "load", "folder": folder, **LOAD}
            worker(recipe, {**job, "side": "make checkpoint", "form": form})
            size = sum(os.path.getsize(file) for file in _weight_files(folder))
            rows = _load_rows(recipe, job, rounds)
            memory = worker(recipe, {**job, "side": "load memory"})
        mib = {name: count / 2**20 for name, count in memory.items()}
        said.append(
            f"host memory beyond what the devices hold, from {form}: peak {mib['beyond']:.0f} MiB; largest fused "
            f"parameter {mib['largest']:.0f} MiB of {mib['total']:.0f}"
        )
        table.add_section()
        table.add_row(f"{size / 1e6:,.0f} MB of {form}")
        for name, (wall, cpu) in sorted(rows.items(), key=lambda row: row[0].split(", ")[-1]):
            base, _ = rows["plain read, " + name.split(", ")[-1]]
            table.add_row(name, f"{size / wall / 1e6:,.0f}", f"{base / wall:.2f}", f"{cpu:.2f}")
    table.caption = "\n".join(said)
    return table


def _load_rows(recipe: str, job: dict[str, Any], rounds: int) -> dict[str, tuple[float, float]]:
    """Side of the table -> median (wall, CPU) seconds."""
    rows: dict[str, list[tuple[float, float]]] = {}
    for _ in range(rounds):
        for cold in (True, False):
            state = "from the disk" if cold else "from the page cache"
            result = worker(recipe, {**job, "cold": cold})
            rows.setdefault(f"plain read, {state}", []).append(_plain_read(job["folder"], cold))
            rows.setdefault(f"onto 8 devices, {state}", []).append(tuple(result["again"]))
            rows.setdefault(f"the first time, with compiles, {state}", []).append(tuple(result["first"]))
    medians = {name: [statistics.median(column) for column in zip(*times, strict=True)] for name, times in rows.items()}
    return {name: (wall, cpu) for name, (wall, cpu) in medians.items()}


def checkpoint(recipe: str, rounds: int) -> Table:
    """Seconds of a save, and of the least that a save must do."""
    found = worker(recipe, {"side": "saves", "rounds": rounds, "hidden_size": 512, "intermediate_size": 512})
    size = found["bytes"]
    table = Table("", "seconds", "MB/s", title=f"{recipe}, hidden size 512: a state of {size / 1e6:,.0f} MB, medians")
    for name, key in (
        ("pause: the state's shards to the host", "pause"),
        ("  plain copy of as many bytes in memory", "copy"),
        ("write, while training goes on", "write"),
        ("  torch.distributed.checkpoint's save of the same tensors, from the host", "theirs"),
        ("  plain write of as many bytes to one file, and fsync", "plain"),
        ("check of every file before a resume", "check"),
    ):
        table.add_row(name, f"{found[key]:.2f}", f"{size / found[key] / 1e6:,.0f}")
    return table


def saves(job: dict[str, Any]) -> dict[str, float]:
    from shardwright.step.build import place_model
    from shardwright.step.train_step import TrainStep
    from shardwright.weights.weight_sources import seeded_init
    from shardwright.xla.device_mesh import build_mesh

    resolved = resolved_job(job, model_config(job))
    mesh = build_mesh(resolved.recipe.mesh)
    state = TrainStep(place_model(resolved, mesh, seeded_init(resolved.model, 0))).state
    size, times = _save_seconds(state, job["rounds"])
    return {"bytes": size, **{name: statistics.median(found) for name, found in times.items()}}


def _save_seconds(state: Any, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """(bytes of a checkpoint, part of a save, or plain way to move as many bytes → seconds in each round)."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import TrainerState

    from shardwright.checkpoint import manifest
    from shardwright.checkpoint.lineage import folder_of
    from shardwright.checkpoint.write import CheckpointWriter
    from shardwright.files.folder import Folder
    from shardwright.xla import sharding

    times: dict[str, list[float]] = {name: [] for name in ("pause", "copy", "write", "theirs", "plain", "check")}
    values = {f"{name}.{k}": each for name in state for k, (_, each) in enumerate(sharding.shards(state[name]))}

    def clocked(name: str, work: Any) -> None:
        started = time.perf_counter()
        work()
        times[name].append(time.perf_counter() - started)

    size = 0
    with tempfile.TemporaryDirectory(dir=".") as local:
        output = Folder(local)
        writer = CheckpointWriter(output, {}, 1)
        for step in range(1, rounds + 1):
            pause, _ = writer.save(state, {"step": step}, TrainerState())
            saved = writer.wait()
            assert saved is not None
            size = saved.bytes
            times["pause"].append(pause)
            times["write"].append(saved.seconds)
            plain, target = torch.zeros(size, dtype=torch.uint8), Path(local, "plain")
            clocked("copy", lambda plain=plain: plain.clone())
            clocked("plain", lambda plain=plain, target=target: _write_plainly(target, plain.numpy()))
            clocked("check", lambda step=step: manifest.check(folder_of(output, step)))
            target.unlink()
            clocked("theirs", lambda aside=Path(local, "theirs"): dcp.save(values, checkpoint_id=aside, no_dist=True))
            shutil.rmtree(Path(local, "theirs"))
    return size, times


def _write_plainly(path: Any, data: Any) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_checkpoint(job: dict[str, Any]) -> dict[str, float]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(model_config(job))
    model.save_pretrained(job["folder"], max_shard_size="200MB")
    for file in _weight_files(job["folder"]):
        _quantize(file, job.get("form", FORMS[0]))
    return {}


def _quantize(file: str, form: str) -> None:
    """Rewrites a file with random codes of ``form`` in the place of a layer's projections."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, values in load_file(file).items():
        rows, columns = values.shape if values.dim() == 2 else (0, 0)
        codes = torch.randint(0, 120, (rows, columns // (2 if form == "MXFP4" else 1)), dtype=torch.uint8)
        if form == FORMS[0] or not rows or ".layers." not in name:
            tensors[name] = values
        elif form == "FP8":
            grid = (-(-rows // 128), -(-columns // 128))
            tensors |= {name: codes.view(torch.float8_e4m3fn), name + "_scale_inv": torch.full(grid, 1e-3)}
        else:
            exponents = torch.full((rows, columns // 32), 120, dtype=torch.uint8)
            tensors |= {name + "_packed": codes, name + "_scale": exponents}
    index = Path(file).with_name("model.safetensors.index.json")
    if index.exists():
        content = json.loads(index.read_text())
        names = {n: held for n, held in content["weight_map"].items() if held != Path(file).name}
        index.write_text(json.dumps({**content, "weight_map": names | dict.fromkeys(tensors, Path(file).name)}))
    save_file(tensors, file, metadata={"format": "pt"})


def load_rate(job: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(wall, CPU) seconds to open and place a hub's weights, the first time, with compiles, and again."""
    from shardwright.xla.runtime import wait_for_devices

    fresh = _placing(job)
    seconds = []
    for _ in range(2):
        _, place = fresh()
        if job["cold"]:
            _evict(job["folder"])
        started = time.perf_counter(), time.process_time()
        placed = place()
        wait_for_devices()
        seconds.append((time.perf_counter() - started[0], time.process_time() - started[1]))
        del placed, place
    return {"first": seconds[0], "again": seconds[1]}


def load_memory(job: dict[str, Any]) -> dict[str, float]:
    """Peak bytes of host memory while loading, beyond those that the (virtual) devices hold there.

    Another process watches anonymous memory only, as pages of mapped files can be dropped. If the job has ``whole``,
    the whole model is read first, as transformers' own loader does.
    """
    import math

    from transformers import AutoModelForCausalLM

    from shardwright.layout.stacking import is_stacked
    from shardwright.weights.weight_sources import state_dict_weights

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
        watch.stdout.readline()  # it is watching
        if job.get("whole"):
            state = AutoModelForCausalLM.from_pretrained(job["folder"]).state_dict()
            placed = place(state_dict_weights(state))
        else:
            placed = place()
        peak = json.loads(watch.communicate("done")[0].splitlines()[-1])["peak"]
    assert placed.keys() == {p.name for p in plan.parameters}
    copies = {p.name: plan.devices * p.bytes_per_device for p in plan.parameters}
    layer = [p.dtype.itemsize * math.prod(p.shape[1:] if is_stacked(p.name) else p.shape) for p in plan.parameters]
    total = sum(p.dtype.itemsize * math.prod(p.shape) for p in plan.parameters)
    return {"beyond": peak - before - sum(copies.values()), "largest": max(layer), "total": total}


def watch_memory(job: dict[str, Any]) -> dict[str, float]:
    """The peak anonymous memory of a process, in bytes, until a line comes in."""
    import select

    print("looking", flush=True)
    peak = 0
    while not select.select([sys.stdin], [], [], 0.0005)[0]:
        peak = max(peak, _anonymous(job["process"]))
    return {"peak": peak}


def _placing(job: dict[str, Any]) -> Any:
    """A function that makes a new model, and returns its plan and a function that places its parameters.

    The latter takes a source; by default the hub's weights in the job's folder.
    """
    import copy

    from transformers import AutoConfig

    from shardwright.weights.hub_read import open_hub_weights
    from shardwright.weights.place import place_parameters
    from shardwright.weights.weight_sources import Source
    from shardwright.xla.device_mesh import build_mesh

    resolved = resolved_job(job, AutoConfig.from_pretrained(job["folder"]))
    mesh, plan = build_mesh(resolved.recipe.mesh), resolved.stored

    def fresh() -> Any:
        model = copy.deepcopy(resolved.assembled)

        def place(source: Source | None = None) -> Any:
            return place_parameters(model, plan, mesh, source or open_hub_weights(job["folder"], resolved.model))

        return plan, place

    return fresh


def _weight_files(folder: str) -> list[str]:
    return [entry.path for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]


def _plain_read(folder: str, cold: bool) -> tuple[float, float]:
    """(wall, CPU) seconds to read the weight files piece by piece into one buffer."""
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
    for path in _weight_files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)  # only clean pages can be dropped
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def _anonymous(process: int) -> int:
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


if __name__ == "__main__":
    sys.exit(exit_code(main))
