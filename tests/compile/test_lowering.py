"""The lowered step is the step: its numbers when run, its layouts, its size whatever the depth, its memory on a TPU."""

from __future__ import annotations

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch_xla

from shardwright.compile.libtpu import CompileTarget, compile_for, sharding_text
from shardwright.compile.lowered_graph import LoweredGraph
from shardwright.compile.lowering import lower
from shardwright.compile.report.report import CompileReport
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import PartitionSpec, axes_of
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import Recipe
from shardwright.models.attention import portable
from shardwright.models.ops import jax_call
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import seeded_init
from shardwright.xla import sharding
from shardwright.xla.device_mesh import build_mesh
from tests.support.cases import SMALL, relative
from tests.support.jobs import job_of
from tests.support.kernels import without_kernel
from tests.support.marking import InPlace, donating_no_base, in_place
from tests.support.paths import ROOT
from tests.support.tpu_compiler import needs_libtpu

LENGTH = 16


@dataclass
class Both:
    """The live step on the 8 devices of this process, and the same one lowered."""

    step: TrainStep
    lowered: LoweredGraph
    constants: dict[int, np.ndarray]
    buffers: dict[str, np.ndarray]
    batch: dict[str, torch.Tensor]

    def state(self) -> dict[str, torch.Tensor]:
        return {name: sharding.fetch(tensor.detach()) for name, tensor in self.step.state.items()}


def make_both(recipe: Recipe, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Both:
    job = job_of(recipe, sequence_length=LENGTH, per_device_train_batch_size=2, **options)
    contexts = []
    original = torch_xla._XLAC.lowering.LoweringContext

    def recorded(name: str) -> Any:
        contexts.append(original(name))
        return contexts[-1]

    monkeypatch.setattr(torch_xla._XLAC.lowering, "LoweringContext", recorded)
    lowered = lower(job, platform="cpu")
    monkeypatch.undo()
    # torch_xla passes Python's numbers as arguments; only the lowering itself knows which is which
    tensors = contexts[-1].device_parameter_id_tensor_mapping()
    constants = {i: tensors[i].cpu().numpy() for i, a in enumerate(lowered.arguments) if a.name == "a constant"}
    placed, rows = place_model(job, build_mesh(recipe.mesh), seeded_init(job.model, seed=0)), job.rows
    tokens = torch.randint(0, job.config.vocab_size, (rows, LENGTH), generator=torch.Generator().manual_seed(0))
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : row % 7] = -100
    batch = {"input_ids": tokens, "labels": labels}
    if job.args.isolate_documents:
        batch["segment_ids"] = 1 + (torch.arange(LENGTH) >= 5).long().expand(rows, LENGTH)
        batch["position_ids"] = torch.cat([torch.arange(5), torch.arange(LENGTH - 5)]).expand(rows, LENGTH)
    buffers = {name: buffer.cpu().numpy() for name, buffer in placed.model.named_buffers()}
    return Both(TrainStep(placed), lowered, constants, buffers, batch)


def run_lowered(both: Both, folder: Path, before: dict[str, torch.Tensor], scalars: list[float]) -> Any:
    """What the lowered step makes of the state ``before``, by name."""
    known = {name: tensor.numpy() for name, tensor in before.items()} | both.buffers
    known |= {"scalars": np.array(scalars, np.float32)}
    count = both.step.accumulation
    for name, tensor in both.batch.items():  # [rows, ...] -> [rows, micro-batches, ...]
        known[name] = tensor.reshape(-1, count, *tensor.shape[1:]).numpy()
    arguments = both.lowered.arguments
    inputs = {str(i): both.constants[i] if i in both.constants else known[a.name] for i, a in enumerate(arguments)}
    donated = {a.output: a for a in arguments if a.output is not None}
    request = {
        "arguments": [(sharding_text(both.lowered.mesh, a.spec), a.output) for a in arguments],
        "outputs": [sharding_text(both.lowered.mesh, spec) for spec in both.lowered.outputs],
        "shapes": [donated[i].shape for i in range(len(donated))],
    }
    (folder / "step.hlo.pb").write_bytes(both.lowered.hlo)
    (folder / "request.json").write_text(json.dumps(request))
    np.savez(folder / "inputs.npz", **inputs)
    program = ROOT / "tests" / "support" / "lowered_on_cpu.py"
    done = subprocess.run(
        [sys.executable, str(program), str(folder)], capture_output=True, text=True, env={**os.environ}, check=False
    )
    assert done.returncode == 0, done.stderr
    results = np.load(folder / "outputs.npz")
    return {donated[i].name: torch.from_numpy(results[str(i)]) for i in range(len(donated))}


def case_of(name: str) -> tuple[Recipe, dict[str, Any]]:
    """A recipe by name, ``… capacity`` or ``… accumulated``, and the options that go with it."""
    name, _, kind = name.partition(" ")
    recipe, options = load_recipe(name), {}
    if kind == "capacity":
        recipe = recipe.computing(experts="capacity")
    if kind == "accumulated":
        options = {"gradient_accumulation_steps": 2, "isolate_documents": True}
    return replace(recipe, model={**(recipe.model or {}), **SMALL}), options


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mixtral_ep capacity", "mixtral_ep", "llama_tp accumulated"])
def test_the_lowered_step_run_on_cpu_devices_gives_the_steps_own_numbers(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe, options = case_of(case)
    # the default epsilon makes of rounding in a gradient near zero a difference in its weight
    both = make_both(recipe, monkeypatch, adam_epsilon=1e-3, weight_decay=0.1, **options)
    both.step(both.batch, step=1, learning_rate=1e-3)  # then no moment is zero
    before = both.state()
    theirs = run_lowered(both, tmp_path, before, scalars=[2e-3, 2.0, 0.0])
    both.step(both.batch, step=2, learning_rate=2e-3)
    ours = both.state()
    assert all(not torch.equal(before[name], ours[name]) for name in ours)
    assert theirs["metrics"][3] == 2  # steps
    # two builds of XLA, torch_xla's and jaxlib's, add in different orders
    assert relative(theirs, ours)[0] <= 1e-6, relative(theirs, ours)


def lowered_for(
    recipe: Recipe, devices: int, *, layers: int = 2, mesh: str | None = None, length: int = 256, **options: Any
) -> tuple[LoweredGraph, ShardingPlan]:
    recipe = recipe.with_mesh(mesh) if mesh else recipe
    sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": layers}  # divisible by 256
    recipe = replace(recipe, model={**(recipe.model or {}), **sizes})
    job = job_of(recipe, devices=devices, sequence_length=length, **options)
    return lower(job), job.plan


def tiles(spec: PartitionSpec, mesh: dict[str, int]) -> list[int]:
    """How many ways a sharding splits each dimension."""
    return [math.prod(mesh[axis] for axis in axes_of(entry)) for entry in spec]


@pytest.mark.parametrize(("name", "devices"), [("mixtral_ep", 256), ("mixtral_fsdp", 256), ("llama_tp", 256)])
def test_a_process_with_8_devices_lowers_for_many_and_every_argument_is_laid_out_as_planned(
    name: str, devices: int
) -> None:
    lowered, plan = lowered_for(load_recipe(name), devices, weight_dtype="bfloat16")
    assert math.prod(lowered.mesh.values()) == devices
    weights = {a.name: a for a in lowered.arguments if a.kind == "weights"}
    assert weights.keys() == {p.name.replace(".0.", ".*.") for p in plan.parameters if ".1." not in p.name}
    split = 0
    for argument in lowered.arguments:
        owner = argument.name.removesuffix(" first moment").removesuffix(" second moment")
        if argument.kind in ("weights", "optimizer"):
            entry = plan[owner.replace(".*.", ".0.")]
            ways = [math.prod(plan.mesh[axis] for axis in entry.axes_of(d)) for d in range(len(entry.shape))]
            assert tiles(argument.spec, plan.mesh) == ([1] if ".*." in owner else []) + ways
            split += math.prod(ways) > 1
            assert argument.dtype == ("bfloat16" if argument.kind == "weights" else "float32")
        elif argument.kind == "batch":
            assert tiles(argument.spec, plan.mesh)[0] == plan.batch_shards > 1
        else:
            assert set(tiles(argument.spec, plan.mesh)) <= {1}
    assert split > len(weights)
    texts = [sharding_text(lowered.mesh, argument.spec) for argument in lowered.arguments]
    assert "{devices=" in str(texts)
    assert "T(0)" not in str(texts)  # in a result's layout MLIR takes it for {replicated}, without a word


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_whole_state_is_donated_and_nothing_else(accumulation: int) -> None:
    lowered, _ = lowered_for(load_recipe("mixtral_ep"), 64, gradient_accumulation_steps=accumulation)
    for argument in lowered.arguments:
        state = argument.kind in ("weights", "optimizer") or argument.name == "metrics"
        assert (argument.output is not None) == state, argument
    donated = [argument for argument in lowered.arguments if argument.output is not None]
    assert sorted(argument.output for argument in donated) == list(range(len(lowered.outputs)))  # type: ignore[type-var]
    assert all(lowered.outputs[argument.output] == argument.spec for argument in donated)  # type: ignore[index]


def test_a_scanned_step_is_as_large_at_32_layers_as_at_4() -> None:
    shallow, deep = (lowered_for(load_recipe("mixtral_ep"), 64, layers=layers)[0] for layers in (4, 32))
    assert (shallow.layers, deep.layers) == (4, 32)
    assert [(a.name, a.spec) for a in shallow.arguments] == [(a.name, a.spec) for a in deep.arguments]
    assert 1000 < instructions(shallow) == instructions(deep)
    assert len(deep.hlo) == pytest.approx(len(shallow.hlo), rel=0.01)


def test_a_share_of_what_layers_make_is_told_value_by_value_as_a_chip_has_it() -> None:
    recipe = load_recipe("llama_tp").with_compute("remat=1.0")
    lowered, _ = lowered_for(recipe, 16, layers=4, mesh="fsdp=4,tensor=4", per_device_train_batch_size=2)
    values = {value.module.removeprefix("model.layers.*."): value for value in lowered.values}
    tokens, layers, bf16 = 2 * 4 * 256, 4, 2
    column, row = values["self_attn.q_proj"], values["self_attn.o_proj"]
    assert (column.shape, column.layers, column.kept) == ((tokens, 512), layers, True)
    assert column.bytes == tokens * 512 * layers * bf16 // 16  # its columns lie on `tensor`, as its weight's rows do
    assert row.bytes == tokens * 512 * layers * bf16 // 4  # each chip of `tensor` has the whole sum
    assert column.flops == row.flops == 2 * tokens * 512 * 512 * layers // 16
    gains = [value.flops / value.bytes for value in lowered.values]
    assert gains == sorted(gains, reverse=True)
    assert "mlp.down_proj" not in values  # no gradient needs what the last product of a layer makes
    none, _ = lowered_for(load_recipe("llama_tp"), 16, mesh="fsdp=4,tensor=4")
    assert none.values == ()


def test_a_lowering_leaves_nothing_behind_that_a_sync_would_compute() -> None:
    lowered_for(load_recipe("mixtral_ep"), 64)
    torch_xla.sync()  # of all that is lazy in this process: a tensor without data would end it
    assert torch.ones(2, device=torch_xla.device()).sum().item() == 2


def instructions(lowered: LoweredGraph) -> int:
    return jax_call.xla_client.XlaComputation(lowered.hlo).as_hlo_text().count(" = ")


_SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}


MARKINGS = ("ours", "in place", "in place, parameters too")


@contextmanager
def marked(how: str) -> Iterator[None]:
    """A step's tensors marked as one of MARKINGS says."""
    with nullcontext() if how == MARKINGS[0] else in_place(parameters=how == MARKINGS[2]):
        yield


def gradient_memory(
    name: str, how: str, *, scan: bool = False, layers: int = 1, length: int = 256, cache: Path | None = None
) -> tuple[LoweredGraph, CompileReport]:
    """The same step (one sequence a chip, v5e:2x4), marked as one of MARKINGS says, and what it takes."""
    recipe = load_recipe(name)
    recipe = replace(
        recipe,
        model={**(recipe.model or {}), **_SIZES, "head_dim": 128, "num_hidden_layers": layers},
        compute=replace(recipe.compute, scan=scan, remat="full" if scan else "none"),
    )
    job = job_of(recipe, sequence_length=length)
    with marked(how):
        lowered = donating_no_base(lower(job))
    return lowered, compile_for(lowered, CompileTarget("v5e:2x4", timeout=600), cache_dir=cache)


@pytest.mark.slow
@needs_libtpu
def test_our_marking_takes_less_memory_than_marking_in_place(tmp_path: Path) -> None:
    (_, ours), (_, theirs) = (gradient_memory("llama_fsdp", how, cache=tmp_path) for how in MARKINGS[::2])
    # a second copy of every weight goes in, and comes out beside the first
    assert theirs.argument_bytes - ours.argument_bytes >= ours.weights_bytes > 0
    assert theirs.output_bytes - theirs.alias_bytes >= ours.output_bytes - ours.alias_bytes + ours.weights_bytes
    assert theirs.required_bytes >= ours.required_bytes + ours.weights_bytes


@pytest.mark.slow
@needs_libtpu
def test_attention_dropout_takes_a_tpu_no_more_memory_and_no_communication(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(portable, "BLOCK", 64)
    monkeypatch.setattr(portable, "BANDS", 1)  # as many as there are with dropout
    without_kernel(monkeypatch)  # the step without dropout has the same loops
    recipe, reports = load_recipe("llama_fsdp"), []
    recipe = recipe.computing(scan=False, remat="none")
    for dropout in (0.0, 0.1):
        changes = {"intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 256, "attention_dropout": dropout}
        job = job_of(replace(recipe, model={**(recipe.model or {}), **changes}), sequence_length=1024)
        reports.append(compile_for(lower(job), CompileTarget("v5e:2x4", timeout=600), cache_dir=tmp_path))
    plain, dropped = reports
    assert dropped.temp_bytes == pytest.approx(plain.temp_bytes, rel=0.1)
    assert dropped.collectives == plain.collectives
    assert dropped.flops == plain.flops


@pytest.mark.parametrize(("how", "values"), [("ours", 1), ("in place", 2)])
def test_a_parameter_marked_in_place_is_computed_twice_by_every_sync_and_ours_once(how: str, values: int) -> None:
    def tensors() -> int:
        gc.collect()
        return torch_xla._XLAC._xla_tensors_report(0, "").count("Tensor: ")

    mesh, spec = build_mesh(Mesh(fsdp=-1)), ("fsdp", None)
    others = tensors()  # those that tests before this one still hold
    placed = sharding.place("a weight", torch.ones(8, 8), mesh, spec)
    ours = sharding.constrain(placed, mesh, spec)
    parameter = torch.nn.Parameter(ours if how == "ours" else InPlace.apply(placed, sharding.layout_text(mesh, spec)))
    del placed, ours
    for _ in range(3):
        gc.collect()
        torch_xla.sync()
        with torch.no_grad():
            parameter.add_(1)
        assert tensors() - others == values


def main() -> None:
    print("v5e:2x4, one sequence a chip; MB a chip")
    columns = ("inputs", "outputs", "weights", "arguments", "new outputs", "temporaries", "required")
    print(f"{'step, layers, tokens a chip':36} {'marked':26}" + "".join(f"{column:>12}" for column in columns))
    for name, scan, layers, length in (
        ("llama_fsdp", False, 1, 256),
        ("mixtral_fsdp", False, 1, 256),
        ("mixtral_fsdp", False, 4, 1024),
        ("mixtral_fsdp", True, 4, 1024),
    ):
        kind = "scanned" if scan else "unscanned"
        step = f"{name}, {layers} {kind}, {length}"
        for how in MARKINGS:
            lowered, report = gradient_memory(name, how, scan=scan, layers=layers, length=length)
            counts = "".join(f"{len(found):12}" for found in (lowered.arguments, lowered.outputs))
            new = report.output_bytes - report.alias_bytes  # that take no argument's place
            sizes = (report.weights_bytes, report.argument_bytes, new, report.temp_bytes, report.required_bytes)
            print(f"{step:36} {how:26}" + counts + "".join(f"{size / 1e6:12,.1f}" for size in sizes), flush=True)


if __name__ == "__main__":
    main()
