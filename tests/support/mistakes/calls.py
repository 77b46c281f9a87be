"""Mistakes in what lies around a run: checkpoints, folders, devices."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from transformers import AutoConfig, GPT2Config

from shardwright import Compute, Mesh, Recipe, Shard
from shardwright.arguments.command_line import parse
from shardwright.arguments.port.published import read_published
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.checkpoint.elastic import kept_batch
from shardwright.checkpoint.lineage import LINEAGE, noted_steps
from shardwright.checkpoint.read import RunCheckpoint, find_checkpoint
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.compile_command import run as compile_run
from shardwright.compile.libtpu import CompileTarget, _check_slices
from shardwright.data.tokenizer import open_tokenizer
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.evaluation.generate import check_positions
from shardwright.evaluation.lm import LM, generation_options
from shardwright.evaluation.open_model import open_model
from shardwright.evaluation.reference_rows import check_sets
from shardwright.evaluation.teacher import teacher_job, teacher_of
from shardwright.files.folder import Folder
from shardwright.files.lock import FolderLock
from shardwright.launch.launch_command import write
from shardwright.launch.launch_plan import LaunchPlan
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config
from shardwright.models.tiny import tiny_config
from shardwright.monitoring.compare import read_runs
from shardwright.monitoring.messages import check_steps_left
from shardwright.monitoring.state import _check_best
from shardwright.prove.small_job import check_provable, small_job
from shardwright.run import _check_resume
from shardwright.xla.cuda_plugin import check as check_plugin
from shardwright.xla.libtpu_library import find_library
from shardwright.xla.runtime import _check_alone, _prepare, init_runtime, meeting_place
from tests.support.checkpoints import write_untrained
from tests.support.fuzz.checkpoints import copied, write_checkpoint
from tests.support.jobs import job_of
from tests.support.lives import TINY
from tests.support.mistakes.data import facts, file, options_of
from tests.support.mistakes.objects import Mistakes

QUIET = Console(quiet=True)
TAUGHT: dict[str, Any] = {"objective": "distill", "teacher": "small", "sequence_length": 64}


@functools.cache
def checkpoint() -> RunCheckpoint:
    return RunCheckpoint(Folder(write_checkpoint(Path("saved/checkpoint-1").absolute())))


def within(name: str, value: str, does: Callable[[], object]) -> None:
    """Calls ``does`` with this variable in the environment."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, value)
        does()


def written(folder: str) -> None:
    write(LaunchPlan({"run.yaml": "a"}, [["true"]], []), Path(folder))


def held(folder: str) -> None:
    with FolderLock(Folder("held"), QUIET), FolderLock(Folder(folder), QUIET):
        pass


def damaged() -> None:
    """The newest checkpoint of a folder in which the only one is damaged."""
    shutil.rmtree("broken", ignore_errors=True)
    write_checkpoint(Path("broken/checkpoint-1"))
    file("broken/checkpoint-1/host.json", "{}")
    find_checkpoint("latest", Folder("broken"), QUIET, lambda found: None)


def listed(lineage: str | None) -> None:
    folder = Path(file("listed/a", "")).parent
    (folder / LINEAGE).unlink(missing_ok=True)
    if lineage is not None:
        (folder / LINEAGE).write_text(lineage)
    noted_steps(Folder(folder))


def epochs_of(count: int) -> Settings:
    """The options of a run of so many epochs, of three steps each."""
    return Settings.of(options_of(num_train_epochs=count)).with_epochs_of(3)


def taught(**options: Any) -> None:
    teacher_job(job_of("llama_fsdp", facts().config, **{**TAUGHT, **options}))


def proved(**options: Any) -> None:
    check_provable(options_of(**options))


def gpt2() -> Any:
    return facts_of(GPT2Config(**json.loads(Path("gpt2.json").read_text())))


def held_once() -> None:
    with FolderLock(Folder("held"), QUIET):
        pass
    held("other")


def saved_run() -> str:
    """A run's folder with its log."""
    os.makedirs("logged", exist_ok=True)
    shutil.copy(Path(str(checkpoint().folder)) / "trainer_state.json", "logged")
    return "logged"


def with_host(saved: RunCheckpoint, folder: str, **said: Any) -> RunCheckpoint:
    """A checkpoint as one of a host that says so of itself."""
    base, scratch = Path(str(saved.folder)), Path(folder).absolute()
    shutil.rmtree(scratch, ignore_errors=True)
    host = json.dumps({**json.loads((base / "host.json").read_text()), **said})
    return RunCheckpoint(Folder(copied(base, scratch, {"host.json": host.encode()})))


def later() -> RunCheckpoint:
    return with_host(checkpoint(), "seventh", step=7)


def on_32(accumulation: int) -> None:
    """Goes on with 16 rows a step on 32 devices."""
    asked = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}
    saved = with_host(untrained(**asked), "two", mesh={"fsdp": 2})
    kept_batch(job_of("llama_fsdp", devices=32, **{**asked, "gradient_accumulation_steps": accumulation}), saved)


def compiled(*words: str) -> None:
    args, options = parse([TrainingArguments, CompileArguments], ["--recipe", "mixtral_pe", *words], None)
    compile_run(args, options, QUIET)


@functools.cache
def untrained(**arguments: Any) -> RunCheckpoint:
    """A checkpoint of the tiny Llama of a run with these options."""
    write_untrained(folder := Path("-".join(["untrained", *arguments])).absolute(), TINY, **arguments)
    return RunCheckpoint(Folder(folder))


def fits(saved: RunCheckpoint | None = None, config: Any = TINY, **options: Any) -> None:
    """Whether a job of the model that ``config`` says goes on from a checkpoint."""
    _check_resume(job_of("llama_fsdp", AutoConfig.for_model(**config), **options), saved or untrained())


def chatted(tokenizer: str) -> None:
    options = EvaluationArguments(model="small", tasks="t", max_length=16, tokenizer=tokenizer)
    LM(*open_model(options, QUIET)).apply_chat_template([{"role": "user", "content": "a"}])


def recipe(**given: Any) -> Recipe:
    return Recipe(**{"mesh": Mesh(fsdp=-1), "batch": ("fsdp",), "parameters": {}, **given})


def by_layers(scan: bool, layouts: bool) -> None:
    """The job of a recipe that places the layers' weights in two ways, or in one."""
    own = load_recipe("llama_fsdp")
    lines = {"model.layers.*.mlp.up_proj.weight": {"fsdp": Shard(0)}}
    if layouts:
        lines = {f"model.layers.{n}.mlp.up_proj.weight": {"fsdp": Shard(n)} for n in (0, 1)}
        lines["model.layers.[23].mlp.up_proj.weight"] = {"fsdp": Shard(0)}
    rest = {name: value for name, value in own.parameters.items() if "up" not in name}
    rest |= {"model.layers.*.mlp.gate_proj.weight": {"fsdp": Shard(0)}}
    job_of(replace(own, parameters=rest | lines, compute=replace(own.compute, scan=scan)))


def of_slices(mesh: dict[str, int], **dcn: int) -> None:
    _check_slices(mesh, CompileTarget("v5p:2x2x1", slices=2, dcn=dcn))


MISTAKES: Mistakes = {
    "an adapter on a whole model's checkpoint": (
        lambda: fits(lora_r=4),
        "this run's options train others",
        {"no --lora_r": fits},
    ),
    "a whole model on an adapter's checkpoint": (
        lambda: fits(untrained(lora_r=4), lora_r=8),
        "this run's options train others",
        {"or a new run, in another --output_dir": lambda: find_checkpoint("latest", Folder("anew"), QUIET, bool)},
    ),
    "another model's checkpoint": (
        lambda: fits(config={**TINY, "num_hidden_layers": 3}),
        "its weights are another model's",
        {"no --model; its config is": fits},
    ),
    "another named model's checkpoint": (
        lambda: fits(untrained(model="llama.json"), config={**TINY, "num_hidden_layers": 3}),
        "its weights are another model's",
        {"--model llama.json": lambda: fits(untrained(model="llama.json"), json.loads(Path("llama.json").read_text()))},
    ),
    "another optimizer's checkpoint": (
        lambda: fits(optim="lion"),
        "the state of adamw",
        {"--optim adamw": lambda: fits(optim="adamw")},
    ),
    "MTP layers that are not trained any more": (
        lambda: fits(untrained(train_mtp=True)),
        "others than those that were saved",
        {
            "--train_mtp true": lambda: fits(
                untrained(train_mtp=True), tiny_config("glm4_moe").to_dict(), train_mtp=True
            )
        },
    ),
    "a batch that more devices can't share": (
        lambda: on_32(1),
        "these devices split a batch 32 ways",
        {"--gradient_accumulation_steps 2": lambda: on_32(2)},
    ),
    "chats for a tokenizer without a template": (
        lambda: chatted("plain"),
        "no chat template that takes these messages",
        {"a tokenizer with a chat_template": lambda: chatted("chatml")},
    ),
    "axes over slices that don't divide": (
        lambda: of_slices({"fsdp": 4, "tensor": 2}, tensor=3),
        "must divide them",
        {"dcn={axis: 2}": lambda: of_slices({"fsdp": 4, "tensor": 2}, fsdp=2)},
    ),
    "a mesh without axes": (Mesh, "layouts place tensors on named axes", {"Mesh(fsdp=-1)": lambda: Mesh(fsdp=-1)}),
    "a mesh in words": (lambda: recipe(mesh="fsdp"), "mesh", {"Mesh(fsdp=-1)": recipe}),
    "a policy in words": (
        lambda: recipe(compute="float32"),
        "compute",
        {'Compute(dtype="float32")': lambda: recipe(compute=Compute(dtype="float32"))},
    ),
    "a recipe without a model": (
        lambda: load_config(None, recipe()),
        "a plan needs shapes",
        {
            "a config.json": lambda: load_config("llama.json", recipe()),
            "such as mixtral_ep": lambda: load_config(None, load_recipe("mixtral_ep")),
        },
    ),
    "layers placed in two ways, scanned": (
        lambda: by_layers(scan=True, layouts=True),
        "they must be alike",
        {
            "Compute(scan=False)": lambda: by_layers(scan=False, layouts=True),
            "one recipe line for all layers": lambda: by_layers(scan=True, layouts=False),
        },
    ),
    "a compile for no TPU": (
        compiled,
        "no --topology",
        {"--topology v5p:4x4x4": lambda: compiled("--topology", "v5p:4x4x4")},
    ),
    "a script that starts nothing": (
        lambda: read_published(file("train.sh", "echo done\n")),
        "a shell script that starts a training",
        {"`trl sft …`": lambda: read_published(file("train.sh", "trl sft --model_name_or_path a --dataset_name b\n"))},
    ),
    "answers beyond the table of positions": (
        lambda: check_positions(gpt2(), 40),
        "has 32 positions",
        {"fewer new tokens (--sample_tokens)": lambda: check_positions(gpt2(), 32)},
    ),
    "other rows, beside the starting weights": (
        lambda: check_sets(options_of(objective="dpo"), {}),
        "compares with the starting weights",
        {"evaluate() of the run's own sets": lambda: check_sets(options_of(objective="dpo"), None)},
    ),
    "a teacher that is a checkpoint": (
        lambda: taught(teacher=str(checkpoint().folder)),
        "a teacher is a whole model",
        {"--teacher FOLDER": taught},
    ),
    "a teacher beside a tokenizer to be trained": (
        lambda: teacher_of(job_of("llama_fsdp", facts().config, **TAUGHT), None),
        "the teacher knows the tokens of its own alone",
        {
            "--tokenizer small": lambda: teacher_of(
                job_of("llama_fsdp", facts().config, **TAUGHT), open_tokenizer("small")
            )
        },
    ),
    "a task that samples otherwise": (
        lambda: generation_options({"until": ["."], "num_beams": 4}, 64),
        "here a text is generated with until",
        {
            "a task with these": lambda: generation_options({"until": ["."], "max_gen_toks": 8}, 64),
            "--max_length above its max_gen_toks": lambda: generation_options({"until": ["."]}, 300),
        },
    ),
    "more of a teacher than it says": (
        lambda: taught(teacher_top_k=999),
        "a vocabulary of 304 tokens",
        {"--teacher_top_k 304": lambda: taught(teacher_top_k=304)},
    ),
    "a store of no known kind": (
        lambda: Folder("xs://bucket/run"),
        "through fsspec's package for it",
        {"a path on a mounted disk": lambda: Folder("run"), "s3fs for s3://": lambda: Folder("s3://bucket/run")},
    ),
    "a folder that another run holds": (
        lambda: held("held"),
        "a run that writes there",
        {"another --output_dir": lambda: held("other"), "the same command once that run has ended": held_once},
    ),
    "an output where nothing may be written": (
        lambda: written("afile/launch"),
        "the files are written there",
        {"--output and a folder that this user may write to": lambda: written("launch")},
    ),
    "runs of a folder that holds none": (
        lambda: read_runs(["text"], "page.html"),
        "a run is compared by the log",
        {"the --output_dir of a run that has saved a checkpoint": lambda: read_runs([saved_run()], "page.html")},
    ),
    "no devices": (
        lambda: Mesh(fsdp=-1).ici_sizes(0),
        "it counts devices",
        {"--devices 8": lambda: Mesh(fsdp=-1).ici_sizes(8)},
    ),
    "a list of checkpoints that is damaged": (
        lambda: listed("[]"),
        "lineage.json can't be read",
        {"or remove listed/lineage.json": lambda: listed(None)},
    ),
    "checkpoints that are all damaged": (
        damaged,
        "none of them undamaged",
        {"another --output_dir": lambda: find_checkpoint("latest", Folder("anew"), QUIET, lambda found: None)},
    ),
    "fewer steps than were done": (
        lambda: check_steps_left(options_of(max_steps=4), later()),
        "there is nothing left to do",
        {
            "--max_steps above 7": lambda: check_steps_left(options_of(max_steps=8), later()),
            "or an older checkpoint": lambda: check_steps_left(options_of(max_steps=4), checkpoint()),
        },
    ),
    "fewer epochs than were done": (
        lambda: check_steps_left(epochs_of(2), later()),
        "--num_train_epochs 2, 6 steps of these data, from",
        {"more epochs": lambda: check_steps_left(epochs_of(3), later())},
    ),
    "the best by no number": (
        lambda: _check_best(options_of(metric_for_best_model="eval_los"), [""], [], True),
        "no evaluation gives that",
        {
            "did you mean 'eval_loss'": lambda: _check_best(
                options_of(metric_for_best_model="eval_loss"), [""], [], True
            )
        },
    ),
    "a proof of weights in fewer bits": (
        lambda: proved(lora_r=4, base_dtype="int8"),
        "PEFT's model here has whole weights",
        {"--base_dtype bfloat16": lambda: proved(lora_r=4)},
    ),
    "a proof of answers in micro-batches": (
        lambda: small_job(job_of("llama_fsdp", objective="dpo", gradient_accumulation_steps=2)),
        "its formula takes a whole batch",
        {"--gradient_accumulation_steps 1": lambda: small_job(job_of("llama_fsdp", objective="dpo"))},
    ),
    "a plugin of another version": (
        lambda: check_plugin((0, 1)),
        "compilers of",
        {"pip install jax-cuda12-pjrt==0.7.1": lambda: check_plugin((0, 75))},
    ),
    "a compiler's folder without one": (
        lambda: find_library("text"),
        "no libtpu.so there",
        {"the path of a libtpu.so": lambda: find_library(file("fake/libtpu.so", ""))},
    ),
    "a port that is none": (
        lambda: meeting_place({"MASTER_PORT": "tcp://10.0.0.1:80", "MASTER_ADDR": "a"}),
        "no number of a port",
        {
            "MASTER_PORT=8546": lambda: meeting_place({"MASTER_PORT": "8546", "MASTER_ADDR": "a"}),
            "or empty": lambda: meeting_place({"MASTER_PORT": "", "MASTER_ADDR": "a"}),
        },
    ),
    "devices that are no number": (
        lambda: within("CPU_NUM_DEVICES", "eight", _prepare),
        "not a whole number from 1 to 127",
        {"CPU_NUM_DEVICES=8": lambda: within("CPU_NUM_DEVICES", "8", _prepare), "leave it unset": _prepare},
    ),
    "devices that were opened before": (
        lambda: within("CPU_NUM_DEVICES", "4", init_runtime),
        "8, opened before",
        {"CPU_NUM_DEVICES": lambda: within("CPU_NUM_DEVICES", "8", init_runtime)},
    ),
    "one of several processes": (
        lambda: within("LOCAL_WORLD_SIZE", "8", _check_alone),
        "each of them would be the whole run again",
        {"the command itself": _check_alone},
    ),
}
