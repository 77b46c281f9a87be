"""Prints a table of what files cost, measured on this machine beside the least that could be done.

python scripts/measure/files.py load        loading a hub's weights onto 8 devices, and plainly reading their files
python scripts/measure/files.py checkpoint  a checkpoint's pause and write, and a plain copy and write of as many bytes

The sides of a table take turns, round by round; it shows the medians.
docs/weights.md and docs/checkpoints.md have the tables as they were on one machine.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import timeit
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from transformers import AutoConfig, AutoModelForCausalLM, TrainerState

from shardwright.checkpoint import manifest
from shardwright.checkpoint.lineage import folder_of
from shardwright.checkpoint.write import CheckpointWriter
from shardwright.files.folder import Folder
from shardwright.hosts.output_streams import exit_code
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.stacking import is_stacked
from shardwright.scripts.measure import tables
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.place import place_parameters
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.runtime import wait_for_devices

# the largest fused parameter, gate and up of a layer's experts, is 32 MiB of 503 MiB
LOAD = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024}
PIECE = 16 << 20  # bytes of a plain read
Seconds = tuple[float, float]  # of the clock, and of the CPU


def load(rounds: int) -> Table:
    """Bytes/s of loading weights and of plainly reading their files; and the host memory that loading took."""
    times: dict[str, list[Seconds]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        tables.apart(make_weights, folder)
        size = sum(path.stat().st_size for path in _weight_files(folder))
        for _ in range(rounds):
            for cold in (True, False):
                state = "from the disk" if cold else "from the page cache"
                first, again = tables.apart(load_twice, folder, cold)
                times[f"plain read, {state}"].append(_clocked(lambda: _read_plainly(folder), folder, cold))
                times[f"onto 8 devices, {state}"].append(again)
                times[f"the first time, with compiles, {state}"].append(first)
        beyond, largest, total = (count / 2**20 for count in tables.apart(load_memory, folder))
    table = Table(
        *("", "MB/s", "ratio", "CPU s"),
        title=f"{size / 1e6:,.0f} MB of {tables.RECIPE}'s family, {LOAD['num_hidden_layers']} layers",
        caption=f"host memory beyond what the devices hold: peak {beyond:.0f} MiB; largest fused parameter "
        f"{largest:.0f} MiB of {total:.0f}",
    )
    base = 0.0
    for name, found in sorted(times.items(), key=lambda row: row[0].split(", ")[-1]):
        wall, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        base = wall if name.startswith("plain read") else base  # the first of its state
        table.add_row(name, f"{size / wall / 1e6:,.0f}", f"{base / wall:.2f}", f"{cpu:.2f}")
    return table


def make_weights(folder: str) -> None:
    model = AutoModelForCausalLM.from_config(tables.model_config(**LOAD))
    model.save_pretrained(folder, max_shard_size="200MB")


def load_twice(folder: str, cold: bool) -> list[Seconds]:
    """Times to open and place a hub's weights: the first time, with compiles, and again."""
    _, place = _placing(folder)

    def placed() -> Any:
        parameters = place()
        wait_for_devices()
        return parameters

    return [_clocked(placed, folder, cold) for _ in range(2)]


def load_memory(folder: str) -> tuple[int, int, int]:
    """Bytes: peak of the host's memory while loading, beyond those that the (virtual) devices hold there; of the
    largest fused parameter; of all.

    Another process watches anonymous memory only, as pages of mapped files can be dropped.
    """
    plan, place = _placing(folder)
    processes, before = multiprocessing.get_context("spawn"), _anonymous(os.getpid())
    here, there = processes.Pipe()
    processes.Process(target=_watch, args=(os.getpid(), there)).start()
    here.recv()  # it is watching
    placed = place()
    here.send("done")
    peak = here.recv()
    assert placed.keys() == {p.name for p in plan.parameters}
    copies = sum(plan.devices * p.bytes_per_device for p in plan.parameters)
    layer = [p.dtype.itemsize * math.prod(p.shape[1:] if is_stacked(p.name) else p.shape) for p in plan.parameters]
    total = sum(p.dtype.itemsize * math.prod(p.shape) for p in plan.parameters)
    return peak - before - copies, max(layer), total


def _watch(process: int, told: Connection) -> None:
    """Sends the peak anonymous memory of ``process``, in bytes, once it is ``told`` that the work is done."""
    told.send("looking")
    peak = 0
    while not told.poll(0.0005):
        peak = max(peak, _anonymous(process))
    told.send(peak)


def _anonymous(process: int) -> int:
    with open(f"/proc/{process}/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("RssAnon"))


def _placing(folder: str) -> tuple[ShardingPlan, Callable[[], dict[str, torch.Tensor]]]:
    """The plan, and a function that places the hub's weights of ``folder`` as the parameters of a new model."""
    job = tables.job_of(AutoConfig.from_pretrained(folder))
    mesh = build_mesh(job.recipe.mesh)

    def place() -> dict[str, torch.Tensor]:
        model = copy.deepcopy(job.assembled)  # on meta
        return place_parameters(model, job.stored, mesh, open_hub_weights(folder, job.model))

    return job.stored, place


def _weight_files(folder: str) -> list[Path]:
    return list(Path(folder).glob("*.safetensors"))


def _read_plainly(folder: str) -> None:
    """Reads the weight files piece by piece into one buffer."""
    buffer = bytearray(PIECE)
    for path in _weight_files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def _clocked(work: Callable[[], Any], folder: str, cold: bool) -> Seconds:
    """The time of ``work``; ``cold``: the weight files are not in the page cache when it begins."""
    for path in _weight_files(folder) if cold else ():
        with open(path, "rb") as file:
            os.fsync(file)  # only clean pages can be dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    started = time.perf_counter(), time.process_time()
    _made = work()  # not freed before the time is taken
    return time.perf_counter() - started[0], time.process_time() - started[1]


def checkpoint(rounds: int) -> Table:
    """Seconds of a save, and of the least that a save must do."""
    size, found = tables.apart(save_seconds, rounds)
    heading = f"{tables.RECIPE}, hidden size 512: a state of {size / 1e6:,.0f} MB, medians"
    table = Table("", "seconds", "MB/s", title=heading)
    for name, seconds in found.items():
        table.add_row(name, f"{statistics.median(seconds):.2f}", f"{size / statistics.median(seconds) / 1e6:,.0f}")
    return table


def save_seconds(rounds: int) -> tuple[int, dict[str, list[float]]]:
    """(bytes of a checkpoint, part of a save, or plain way to move as many bytes → seconds in each round)."""
    job = tables.job_of(tables.model_config(hidden_size=512, intermediate_size=512))
    state = TrainStep(place_model(job, build_mesh(job.recipe.mesh), seeded_init(job.model, 0))).state
    size, times = 0, defaultdict[str, list[float]](list)
    with tempfile.TemporaryDirectory(dir=".") as local:
        output = Folder(local)
        writer = CheckpointWriter(output, {}, 1)
        for step in range(1, rounds + 1):
            pause, _ = writer.save(state, {"step": step}, TrainerState())
            saved = writer.wait()
            assert saved is not None
            size, plain = saved.bytes, torch.zeros(saved.bytes, dtype=torch.uint8)
            check = partial(manifest.check, folder_of(output, step))
            for name, seconds in (
                ("pause: the state's shards to the host", pause),
                ("  plain copy of as many bytes in memory", timeit.timeit(plain.clone, number=1)),
                ("write, while training goes on", saved.seconds),
                ("  plain write of as many bytes to one file, and fsync", _plain_write(Path(local, "plain"), plain)),
                ("check of every file before a resume", timeit.timeit(check, number=1)),
            ):
                times[name].append(seconds)
    return size, times


def _plain_write(path: Path, data: torch.Tensor) -> float:
    started = time.perf_counter()
    with path.open("wb") as file:
        file.write(data.numpy().data)
        file.flush()
        os.fsync(file.fileno())
    return time.perf_counter() - started


def main() -> None:
    tables.run({"load": load, "checkpoint": checkpoint}, __doc__)


if __name__ == "__main__":
    sys.exit(exit_code(main))
