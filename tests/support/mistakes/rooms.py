"""Mistakes in data as a run reads them, and in the commands beside it: each in its room, on files of `write`."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from rich.console import Console
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.compile.compile_job import CompileJob
from shardwright.data.corpus import load_corpus
from shardwright.data.from_arguments import asked_tokenizer, data_options
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.evaluation.open_model import open_model
from shardwright.launch.launch_arguments import LaunchArguments
from shardwright.launch.targets import read_request
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config
from shardwright.weights.hub_write import ExportFormat
from tests.support.chats import CHATML, REASONING, byte_tokenizer, chats, write_records
from tests.support.fuzz.checkpoints import write_checkpoint
from tests.support.lives import TINY
from tests.support.mends import Request

ASKED = {"role": "user", "content": "Why?"}
THOUGHT = {"role": "assistant", "content": "<think>so</think>Because."}
LONG = [ASKED, THOUGHT, ASKED, THOUGHT]
RECORDS = {
    "chats": chats(400),
    "few": chats(40),
    "more": chats(300),
    "empty_answer": [*chats(200), {"messages": [ASKED, {"role": "assistant", "content": ""}]}],
    "templated": [{"text": f"<|im_start|>user\n{i}<|im_end|>\n"} for i in range(400)],
    "pairs": [{"prompt": [ASKED], "chosen": LONG[1:], "rejected": [THOUGHT]}] * 400,
}
DATA = {"recipe": "llama_fsdp", "model": "llama.json", "tokenizer": "chatml", "sequence_length": 128, "max_steps": 4}
DATA |= {"isolate_documents": True}  # as a run has it of samples
LAUNCH = {"": "jobset", "topology": "v5p:2x2x4", "image": "i", "recipe": "llama_fsdp", "output_dir": "gs://b/run"}
EXPORT = {"key_format": "original", "max_shard_size": "5GB", "format": None}
COMPILE = {"recipe": "mixtral_ep", "topology": "v5p:2x2x2", "max_steps": 4}
EVALUATE = {"model": "small", "tasks": "t", "max_length": 16}
OF_LAUNCH = {"", "topology", "image", "slices", "env", "zone", "mount", "cluster"}


def of_data(options: dict[str, object]) -> None:
    (args,) = parse([TrainingArguments], flags(options), None)
    config = load_config(args.model, load_recipe(args.recipe))
    load_corpus(data_options(args, config), asked_tokenizer(args, config), config.vocab_size)


def of_launch(options: dict[str, object]) -> None:
    words = [f"--{name}={value}" for name, value in options.items() if name in OF_LAUNCH - {""}]
    (own,) = parse([LaunchArguments], words, None)
    train = [f"--{name}={value}" for name, value in options.items() if name not in OF_LAUNCH]
    assert read_request(str(options[""]), own, train).environment is not None


def of_export(options: dict[str, object]) -> None:
    ExportFormat(**options)  # type: ignore[arg-type]


def of_compile(options: dict[str, object]) -> None:
    args, own = parse([TrainingArguments, CompileArguments], flags(options), None)
    job = CompileJob.of(args, own)
    assert job.flags
    assert job.job.recipe.mesh.over_slices(job.where.slices, job.where.devices)


def of_evaluation(options: dict[str, object]) -> None:
    (args,) = parse([EvaluationArguments], flags(options), None)
    open_model(args, Console(quiet=True))


def flags(options: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items() if value is not None]


ROOMS: dict[str, tuple[Callable[[dict[str, object]], None], dict[str, object]]] = {
    "data": (of_data, DATA),
    "launch": (of_launch, LAUNCH),
    "export": (of_export, EXPORT),
    "compile": (of_compile, COMPILE),
    "evaluate": (of_evaluation, EVALUATE),
}
# mistake → (room, the options that make it, words of the message, and as for those of a run)
MISTAKES: dict[str, tuple[Any, ...]] = {
    "an empty answer": ("data", {"dataset": "empty_answer.jsonl"}, "message 2 (assistant) is empty"),
    "a chat longer than a row": (
        "data",
        {"dataset": "chats.jsonl", "sequence_length": 32, "overflow": "error"},
        "a sample of 326 tokens",
    ),
    "chats whose answers lie beyond a row": (
        "data",
        {"dataset": "chats.jsonl", "sequence_length": 16},
        "nothing to train on",
    ),
    "a part of a split": ("data", {"dataset": "chats.jsonl#train[:10%]"}, "a part of the split train"),
    "chats without a template": ("data", {"dataset": "chats.jsonl", "tokenizer": "plain"}, "has no chat template"),
    "texts with the names of special tokens": ("data", {"dataset": "templated.jsonl"}, "the name of a special token"),
    "a pair of several samples": (
        "data",
        {"dataset": "pairs.jsonl", "objective": "dpo", "tokenizer": "reasoning"},
        "samples",
    ),
    "a stream that fills no held-out row": (
        "data",
        {"dataset": "few.jsonl", "sequence_length": 4096, "streaming": True},
        "don't fill one row",
    ),
    "streams without weights": ("data", {"dataset": "chats.jsonl,more.jsonl", "streaming": True}, "no weights"),
    "a target misspelt": ("launch", {"": "jobsett"}, "no target of that name"),
    "no topology": ("launch", {"topology": None}, "no --topology"),
    "a topology that is none": ("launch", {"topology": "v5p:3x3x3"}, "v5p:3x3x3"),
    "no slices": ("launch", {"slices": 0}, "at least one slice"),
    "a variable without a value": ("launch", {"env": "HF_TOKEN"}, "each word sets a variable"),
    "a host's own folder": ("launch", {"output_dir": "out"}, "container's own disk"),
    "one checkpoint": ("launch", {"resume_from_checkpoint": "gs://b/run/checkpoint-1"}, "one checkpoint"),
    "no image": ("launch", {"image": None}, "no --image"),
    "a size that is none": ("export", {"max_shard_size": "5 apples"}, "it is the size of a file"),
    "quantized under new names": ("export", {"format": "fp8", "key_format": "new"}, "names of transformers 5"),
    "a generation misspelt": ("compile", {"topology": "v5q:2x2x2"}, "no TPU generation"),
    "a slice that is not made": ("compile", {"topology": "v5p:2x2x3"}, "no slice of that name"),
    "slices of none": ("compile", {"slices": 0}, "at least one slice"),
    "a search of less than no time": ("compile", {"tune": -1}, "0 is no search"),
    "a compile given up at once": ("compile", {"compile_timeout": 0}, "takes seconds to minutes"),
    "an efficiency misspelt": ("compile", {"efficiency": "gmn=0.8"}, "no kind 'gmn'"),
    "an efficiency in percent": ("compile", {"efficiency": "gmm=80"}, "the part of a peak"),
    "an efficiency without a value": ("compile", {"efficiency": "gmm"}, "the part of a peak"),
    "a flag without a value": ("compile", {"compiler_options": "xla_tpu_x"}, "a name and a value"),
    "a compiler that is not there": ("compile", {"libtpu": "9.9.9"}, "no such version"),
    "a mesh of fewer devices": ("compile", {"mesh": "fsdp=2,expert=2"}, "multiply to 4"),
    "an axis over slices that is not there": ("compile", {"slices": 2}, "the devices form 2 slices"),
    "prompts that are not there": ("compile", {"sample_prompts": "absent.txt"}, "no such file"),
    "a recipe for a compile misspelt": ("compile", {"recipe": "mixtral_pe"}, "did you mean"),
    "a base's dtype without an adapter": ("evaluate", {"base_dtype": "int8"}, "without an adapter"),
    "no limit": ("evaluate", {"limit": 0}, "nothing would be measured"),
    "fewer examples than none": ("evaluate", {"num_fewshot": -1}, "counts examples"),
    "rows of one token": ("evaluate", {"max_length": 1}, "a row needs a token"),
    "rows of none": ("evaluate", {"batch_size": 0}, "it counts rows"),
    "no tasks": ("evaluate", {"tasks": ","}, "nothing would be measured"),
    "chats without a template, evaluated": (
        "evaluate",
        {"tokenizer": "plain", "apply_chat_template": "true"},
        "it says how messages become text",
    ),
    "an adapter beside a checkpoint": (
        "evaluate",
        {"model": "run/checkpoint-1", "adapter": "adapter"},
        "a checkpoint is measured as it is",
        {"--model with a folder in the hub's format": {"model": "small"}},
    ),
    "an adapter that lacks factors": (
        "evaluate",
        {"adapter": "lacking"},
        "its factors are not those",
        {"the adapter as PEFT saved it": {"adapter": "adapter"}},
    ),
    "an adapter that names no base": (
        "evaluate",
        {"model": "unnamed"},
        "an adapter is measured on top of its model",
        {"--model with that model's hub id or folder": {"model": "small"}},
    ),
    "a bucket on a TPU VM": (
        "launch",
        {"": "tpu-vm", "mount": "gs://b:/mnt", "zone": "z"},
        "a TPU VM mounts none",
        {"--mount /mnt/bucket:/mnt/bucket": {"mount": "/mnt/bucket:/mnt/bucket", "output_dir": "/mnt/bucket/run"}},
    ),
    "slices that a target can't tell apart": (
        "launch",
        {"": "skypilot", "slices": 2},
        "does not tell a host which slice",
        {"--slices 1": {"slices": 1}, "xpk, jobset or tpu-vm": {"": "jobset"}},
    ),
    "a file of this machine": (
        "launch",
        {"dataset": "chats.jsonl", "mount": "gs://b:/mnt"},
        "which is sent to no host",
        {"a copy of it under /mnt": {"dataset": "/mnt/chats.jsonl"}, "a hub id": {"dataset": "owner/chats"}},
    ),
    "a dtype of weights that is none": ("evaluate", {"weight_dtype": "fp16"}, "none of the known ones"),
    "a folder of an adapter that is none": ("evaluate", {"adapter": "plain"}, "plain"),
    "a folder with a tokenizer alone": ("evaluate", {"model": "plain"}, "no file plain/config.json"),
    "a mesh that devices don't fill": ("evaluate", {"mesh": "fsdp=3"}, "multiply to 3"),
    "experts that are not there": ("evaluate", {"compute": "experts=capacity"}, "has no experts"),
}
# of these the message says what to do in words alone
IN_WORDS = {
    *("a compiler that is not there", "prompts that are not there"),
    *("a folder of an adapter that is none", "a folder with a tokenizer alone"),
}


def write(root: Path) -> None:
    (root / "llama.json").write_text(json.dumps(TINY))
    for name, records in RECORDS.items():
        write_records(root / f"{name}.jsonl", records)
    for name, template in {"plain": None, "chatml": CHATML, "reasoning": REASONING}.items():
        byte_tokenizer(template).save_pretrained(root / name)
    LlamaForCausalLM(LlamaConfig.from_dict(TINY)).save_pretrained(root / "small")
    byte_tokenizer(CHATML).save_pretrained(root / "small")
    write_checkpoint(root / "run/checkpoint-1")
    factors = {}
    for layer in ("0", "1"):
        name = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_"
        factors |= {f"{name}A.weight": torch.zeros(2, 16), f"{name}B.weight": torch.zeros(16, 2)}
    for name, count in {"adapter": 4, "lacking": 3}.items():
        LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path="small").save_pretrained(root / name)
        save_file(dict([*factors.items()][:count]), root / name / "adapter_model.safetensors")
    (root / "unnamed").mkdir()
    (root / "unnamed/adapter_config.json").write_text('{"peft_type": "LORA"}')


def refusal_of(room: str, asked: Request) -> UserError | None:
    try:
        ROOMS[room][0](dict(asked.options or {}))
    except UserError as error:
        return error
    except SystemExit:
        return UserError(asked=shlex.join(map(str, (asked.options or {}).items())), found="", why="", instead="")
    return None
