"""Prints a table of what files cost, measured on this machine beside the least that could be done.

python scripts/measure/files.py load        loading a hub's weights onto 8 devices, plain and quantized, and plainly
                                            reading their files
python scripts/measure/files.py checkpoint  a checkpoint's pause and write, a plain copy and write of as many bytes, and
                                            torch.distributed.checkpoint's save of them

The sides of a table take turns, round by round; it shows the medians.
docs/records/speed.md has the tables as they were on one machine.
"""

import copy
import functools
import json
import math
import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.arguments.command_line import Parser
from shardwright.hosts.output_streams import exit_code
from shardwright.scripts.measure.tables import in_fresh_process, job_here, own_config

# the largest fused parameter, gate and up of a layer's experts, is 32 MiB of 503 MiB
LOAD = {"num_hidden_layers": 10, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 2048}
FORMS = ("float32", "FP8", "MXFP4")  # of a checkpoint's layers
PIECE = 16 << 20  # bytes of a plain read
HIDDEN = 896  # of the model whose state is saved

Seconds = tuple[float, float]  # wall, CPU


def main() -> int:
    tables = {"load": load, "checkpoint": checkpoint}
    parser = Parser(__doc__)
    parser.add_argument("what", choices=tables, help="the table to print")
    parser.add_argument("--recipe", default="mixtral_ep", help="the recipe whose own small model runs (mixtral_ep)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured (3)")
    args = parser.parse_args()
    Console(width=140).print(tables[args.what](args.recipe, args.rounds))
    return 0


def clocked(work: Callable[..., Any], *given: Any) -> Seconds:
    wall, cpu = time.perf_counter(), time.process_time()
    made = work(*given)
    seconds = time.perf_counter() - wall, time.process_time() - cpu
    del made  # it takes time too
    return seconds


def load(recipe: str, rounds: int) -> Table:
    """Bytes/s of loading weights and of plainly reading their files; and the host memory that loading took."""
    table = Table("", "MB/s", "ratio", "CPU s", title=f"{recipe}'s family, {LOAD['num_hidden_layers']} layers")
    said = []
    for form in FORMS:
        with tempfile.TemporaryDirectory() as folder:
            in_fresh_process(make_checkpoint, recipe, folder, form)
            size = sum(os.path.getsize(file) for file in _weight_files(folder))
            rows = _load_rows(recipe, folder, rounds)
            peaks = {way: in_fresh_process(load_memory, recipe, folder, way) for way in ("read", "placed")}
            largest, total = (count / 2**20 for count in peaks["read"][1:])
        said.append(
            f"host memory from {form}: read {peaks['read'][0] / 2**20:.0f} MiB at most, placed on devices that are the "
            f"host's too {peaks['placed'][0] / 2**20:.0f} beyond what they hold; largest fused parameter "
            f"{largest:.0f} MiB of {total:.0f}"
        )
        table.add_section()
        table.add_row(f"{size / 1e6:,.0f} MB of {form}")
        for (state, name), (wall, cpu) in sorted(rows.items()):
            ratio = rows[state, PLAIN][0] / wall
            table.add_row(f"{name}, {state}", f"{size / wall / 1e6:,.0f}", f"{ratio:.2f}", f"{cpu:.2f}")
    table.caption = "\n".join(said)
    return table


PLAIN = "plain read"


def _load_rows(recipe: str, folder: str, rounds: int) -> dict[tuple[str, str], Seconds]:
    """(state of the files, side of the table) → median seconds."""
    rows: dict[tuple[str, str], list[Seconds]] = {}
    for _ in range(rounds):
        for cold in (True, False):
            first, again = in_fresh_process(load_seconds, recipe, folder, cold)
            sides = {PLAIN: _plain_read(folder, cold), "onto 8 devices": again, "the first time, with compiles": first}
            for name, seconds in sides.items():
                rows.setdefault(("from the disk" if cold else "from the page cache", name), []).append(seconds)
    return {key: (statistics.median(w for w, _ in of), statistics.median(c for _, c in of)) for key, of in rows.items()}


def checkpoint(recipe: str, rounds: int) -> Table:
    """Seconds of a save, and of the least that a save must do."""
    size, seconds = in_fresh_process(save_seconds, recipe, rounds)
    title = f"{recipe}, hidden size {HIDDEN}: a state of {size / 1e6:,.0f} MB, medians"
    table = Table("", "seconds", "MB/s", title=title)
    for name, of in seconds.items():
        found = statistics.median(of)
        table.add_row(name, f"{found:.2f}", f"{size / found / 1e6:,.0f}")
    return table


def save_seconds(recipe: str, rounds: int) -> tuple[int, dict[str, list[float]]]:
    """(bytes of a checkpoint, part of a save, or plain way to move as many bytes → seconds in each round)."""
    import torch
    import torch.distributed.checkpoint as dcp
    from transformers import TrainerState

    from shardwright.checkpoint import manifest
    from shardwright.checkpoint.lineage import folder_of
    from shardwright.checkpoint.write import CheckpointWriter
    from shardwright.files.folder import Folder
    from shardwright.step.build import place_model
    from shardwright.step.train_step import TrainStep
    from shardwright.weights.weight_sources import seeded_init
    from shardwright.xla import sharding
    from shardwright.xla.device_mesh import build_mesh

    job = job_here(recipe, own_config(recipe, hidden_size=HIDDEN, intermediate_size=512))
    state = TrainStep(place_model(job, build_mesh(job.recipe.mesh), seeded_init(job.model, 0))).state
    values = {f"{name}.{k}": each for name in state for k, (_, each) in enumerate(sharding.shards(state[name]))}
    found: dict[str, list[float]] = {}
    size = 0
    with tempfile.TemporaryDirectory(dir=".") as local:
        output, target, theirs = Folder(local), Path(local, "plain"), Path(local, "theirs")
        save_theirs = functools.partial(dcp.save, values, checkpoint_id=theirs, no_dist=True)
        writer = CheckpointWriter(output, {}, 1)
        for step in range(1, rounds + 1):
            pause, _ = writer.save(state, {"step": step}, TrainerState())
            saved = writer.wait()
            assert saved is not None
            size = saved.bytes
            plain = torch.zeros(size, dtype=torch.uint8)
            for name, seconds in {
                "pause: the state's shards to the host": pause,
                "  plain copy of as many bytes in memory": clocked(plain.clone)[0],
                "write, while training goes on": saved.seconds,
                "  torch.distributed.checkpoint's save of the same tensors, from the host": clocked(save_theirs)[0],
                "  plain write of as many bytes to one file, and fsync": clocked(_write, target, plain.numpy())[0],
                "check of every file before a resume": clocked(manifest.check, folder_of(output, step))[0],
            }.items():
                found.setdefault(name, []).append(seconds)
            target.unlink()
            shutil.rmtree(theirs)
    return size, found


def _write(path: Any, data: Any) -> None:
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def make_checkpoint(recipe: str, folder: str, form: str = FORMS[0]) -> None:
    """Writes random weights of the recipe's family as files of the hub's, the layers' in ``form``."""
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(own_config(recipe, **LOAD)).save_pretrained(folder, max_shard_size="200MB")
    for file in _weight_files(folder) if form != FORMS[0] else ():
        _quantize(file, form)


def _quantize(file: str, form: str) -> None:
    """Rewrites a file with random codes of ``form`` in the place of a layer's projections."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = {}
    for name, values in load_file(file).items():
        rows, columns = values.shape if values.dim() == 2 else (0, 0)
        codes = torch.randint(0, 120, (rows, columns // (2 if form == "MXFP4" else 1)), dtype=torch.uint8)
        if not rows or ".layers." not in name:
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


def load_seconds(recipe: str, folder: str, cold: bool) -> tuple[Seconds, Seconds]:
    """Seconds to open and place a hub's weights: the first time, with compiles, and again."""
    from shardwright.weights.hub_read import open_hub_weights
    from shardwright.weights.place import place_parameters
    from shardwright.xla.runtime import wait_for_devices

    job, mesh = _opened(recipe, folder)

    def placed(model: Any) -> Any:
        made = place_parameters(model, job.stored, mesh, open_hub_weights(folder, job.model))
        wait_for_devices()
        return made

    found = []
    for _ in range(2):
        model = copy.deepcopy(job.assembled)
        if cold:
            _evict(folder)
        found.append(clocked(placed, model))
    return found[0], found[1]


def load_memory(recipe: str, folder: str, way: str) -> tuple[int, int, int]:
    """Bytes of the peak of host memory while loading, beyond those that the (virtual) devices hold there; of the
    largest fused parameter; of all of them.

    Another process watches anonymous memory only, as pages of mapped files can be dropped. ``way``: each parameter's
    shards are "read" and dropped; they are "placed"; or the "whole" model is read before, as transformers' loader does.
    """
    from transformers import AutoModelForCausalLM

    from shardwright.layout.stacking import is_stacked
    from shardwright.weights.hub_read import open_hub_weights
    from shardwright.weights.place import place_parameters
    from shardwright.weights.weight_sources import Source, state_dict_weights
    from shardwright.xla.sharding import shards_on_host

    job, mesh = _opened(recipe, folder)
    model, plan = copy.deepcopy(job.assembled), job.stored  # copying is no part of loading
    before = _anonymous(os.getpid())
    here, there = multiprocessing.Pipe()
    watch = multiprocessing.get_context("spawn").Process(target=watch_memory, args=(os.getpid(), there))
    watch.start()
    here.recv()  # it is watching
    source: Source = open_hub_weights(folder, job.model)
    copies = sum(plan.devices * p.bytes_per_device for p in plan.parameters)
    if way == "read":
        copies = 0
        for entry in plan.parameters:
            spec = plan.specs[entry.name][is_stacked(entry.name) :]
            for name in plan.members(entry.name):
                shards_on_host(name, source(name), mesh, spec, entry.dtype)
    else:
        if way == "whole":
            source = state_dict_weights(AutoModelForCausalLM.from_pretrained(folder).state_dict())
        assert place_parameters(model, plan, mesh, source).keys() == {p.name for p in plan.parameters}
    here.send("done")
    peak = here.recv()
    watch.join()
    layer = [p.dtype.itemsize * math.prod(p.shape[1:] if is_stacked(p.name) else p.shape) for p in plan.parameters]
    total = sum(p.dtype.itemsize * math.prod(p.shape) for p in plan.parameters)
    return peak - before - copies, max(layer), total


def watch_memory(process: int, told: Any) -> None:
    """Sends, over the pipe ``told``, the peak anonymous memory of a process, in bytes, until a word comes in."""
    told.send("watching")
    peak = 0
    while not told.poll(0.0005):
        peak = max(peak, _anonymous(process))
    told.send(peak)


def _opened(recipe: str, folder: str) -> tuple[Any, Any]:
    """The job of a recipe on the config in ``folder``, and its mesh."""
    from transformers import AutoConfig

    from shardwright.xla.device_mesh import build_mesh

    job = job_here(recipe, AutoConfig.from_pretrained(folder))
    return job, build_mesh(job.recipe.mesh)


def _weight_files(folder: str) -> list[str]:
    return [entry.path for entry in os.scandir(folder) if entry.name.endswith(".safetensors")]


def _plain_read(folder: str, cold: bool) -> Seconds:
    """Seconds to read the weight files piece by piece into one buffer."""
    if cold:
        _evict(folder)
    buffer = bytearray(PIECE)

    def read() -> None:
        for path in _weight_files(folder):
            with open(path, "rb", buffering=0) as file:
                while file.readinto(buffer):
                    pass

    return clocked(read)


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
