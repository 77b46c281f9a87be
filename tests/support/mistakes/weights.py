"""Mistakes in weights: folders of models and of adapters, bases in fewer bits, what an export and a loss can't have."""

from __future__ import annotations

import datetime
import functools
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from shardwright.arguments.training import TrainingArguments
from shardwright.model.meta_model import meta_model
from shardwright.models.tiny import tiny_config
from shardwright.scripts import export
from shardwright.scripts.export import _check_adapter
from shardwright.scripts.plan import _check_made
from shardwright.weights.adapter_weights import check_adapter
from shardwright.weights.hub_read import open_hub_weights
from shardwright.weights.hub_write import ExportFormat, hub_tensors
from shardwright.weights.packed_source import packed_source
from shardwright.weights.quantize import SAME, SCHEMES, quantize
from shardwright.weights.weight_sources import state_dict_weights
from tests.support import quantized
from tests.support.jobs import job_of
from tests.support.mistakes.objects import Mistakes

MEASURED = {"quant_method": "fp8", "activation_scheme": "static"}


def opened(folder: str, **how: Any) -> Any:
    return open_hub_weights(folder, meta_model(AutoConfig.from_pretrained(folder)), **how)


def copy(name: str) -> Path:
    """A copy of the model in `small`."""
    shutil.rmtree(name, ignore_errors=True)
    return Path(shutil.copytree("small", name))


def without_weights() -> str:
    (folder := copy("bare")).joinpath("model.safetensors").unlink()
    return str(folder)


def cut() -> str:
    file = copy("cut") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    return "cut"


def pickled() -> str:
    """A file of tensors, and of something else."""
    folder = copy("pickled")
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save({**tensors, "when": datetime.timedelta(1)}, folder / "pytorch_model.bin")
    return "pickled"


def tensors_alone() -> None:
    """Run the line of Python that the message gives for a file that is trusted."""
    file = "pickled/pytorch_model.bin"
    kept = {n: t for n, t in torch.load(file, weights_only=False).items() if torch.is_tensor(t)}
    torch.save(kept, file)
    opened("pickled")


def written(asked: str, base: str, *, trained: str = "", gone: bool = False) -> None:
    """The tensors of an export in the format ``asked`` of the weights in ``trained``, or in their ``base``."""
    config = AutoConfig.from_pretrained(base)
    model, source = meta_model(config), opened(base)
    if trained:
        source = state_dict_weights(load_file(f"{trained}/model.safetensors"))
    tensors, _ = hub_tensors(model, source, form := ExportFormat(format=asked))
    if form.format in (*SCHEMES, SAME):
        made = quantize(asked, model, tensors, None if gone or trained else source)
        for each in made.tensors(tensors).values() if made is not None else ():
            each.read()


def of_scheme(name: str, scheme: Any, settings: Any) -> str:
    folder = copy(name)
    quantized.quantize(folder, {quantized.PROJECTIONS.pattern: scheme}, settings)
    return name


def infinite() -> str:
    file = copy("infinite") / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 4] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    return "infinite"


def adapter(**options: Any) -> None:
    recipe = options.pop("recipe", "llama_fsdp")
    check_adapter(job_of(recipe, options.pop("config", None), lora_r=2, **options))


def packed(value: float, base_dtype: str = "int8") -> None:
    """Reads a weight with ``value`` in it as it is stored under an adapter."""
    plan = job_of("llama_fsdp", lora_r=4, base_dtype=base_dtype).stored
    weight = torch.ones(128, 64)
    weight[3, 5] = value
    source = state_dict_weights({"model.layers.1.mlp.up_proj.weight": weight})
    made = packed_source(source, plan) if base_dtype != "bfloat16" else source
    _ = made("model.layers.1.mlp.up_proj.weight")[slice(0, 128), slice(0, 64)]


@functools.cache
def fused() -> str:
    AutoModelForCausalLM.from_config(tiny_config("gpt_oss")).save_pretrained("fused")
    return "fused"


@functools.cache
def mtp() -> str:
    AutoModelForCausalLM.from_config(tiny_config("deepseek_v3")).save_pretrained("mtp")
    return "mtp"


def with_mtp(train: bool) -> None:
    open_hub_weights(mtp(), meta_model(AutoConfig.from_pretrained(mtp()), train))


def export_asked(adapter: bool, *words: str) -> None:
    _check_adapter(export.parser().parse_args(["--checkpoint", "run", "--output", "out", *words]), adapter)


def exported_to(output: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["export.py", "--checkpoint", "run/checkpoint-1", "--output", output])
        export.main()


MISTAKES: Mistakes = {
    "an export into what is there": (
        lambda: exported_to("small"),
        "never writes over",
        {"another --output": lambda: exported_to("exported")},
    ),
    "a merge of no adapter": (
        lambda: export_asked(False, "--merge"),
        "those of a plain model already",
        {"no --merge": lambda: export_asked(False)},
    ),
    "an adapter in fewer bits": (
        lambda: export_asked(True, "--format", "fp8"),
        "beside a base that stays as it is",
        {
            "--merge": lambda: export_asked(True, "--format", "fp8", "--merge"),
            "no --format": lambda: export_asked(True),
        },
    ),
    "a recipe that is a file, to be written": (
        lambda: _check_made("new.py", "llama_fsdp"),
        "a recipe that is a file already",
        {"--recipe auto": lambda: _check_made("new.py", "auto")},
    ),
    "a recipe's file without its ending": (
        lambda: _check_made("new", "auto"),
        "--write",
        {"my_recipe.py": lambda: _check_made("my_recipe.py", "auto")},
    ),
    "a folder without weights": (
        lambda: opened(without_weights()),
        "the weights are not there",
        {
            "one with model.safetensors": lambda: opened("small"),
            "--from_scratch": lambda: TrainingArguments(model="bare", from_scratch=True),
        },
    ),
    "a file that is cut": (
        lambda: opened(cut()),
        "the file is truncated",
        {"download model.safetensors again": lambda: opened("small")},
    ),
    "a pickle of more than tensors": (
        lambda: opened(pickled()),
        "it holds more than tensors by name",
        {
            "torch.save({n: t for n, t in torch.load('pickled/pytorch_model.bin', weights_only=False).items() "
            "if torch.is_tensor(t)}, 'pickled/pytorch_model.bin')": tensors_alone
        },
    ),
    "MTP layers that are in no file": (
        lambda: with_mtp(True),
        "no MTP layers in its files",
        {"no --train_mtp": lambda: with_mtp(False)},
    ),
    "weights that the config says are quantized": (
        lambda: opened("small", packed=["model.layers.0.self_attn.q_proj.weight"]),
        "are by its config",
        {"another --base_dtype": lambda: opened("small", packed=[])},
    ),
    "a weight without a code": (
        lambda: packed(float("nan")),
        "there is no code for it",
        {
            "--base_dtype bfloat16": lambda: packed(float("nan"), "bfloat16"),
            "a checkpoint without such": lambda: packed(1.0),
        },
    ),
    "a weight that can't be quantized": (
        lambda: written("fp8", "small", trained=infinite()),
        "with values that are infinite",
        {
            "an earlier checkpoint": lambda: written("fp8", "small"),
            "--format bf16": lambda: written("bf16", "small", trained="infinite"),
        },
    ),
    "a base that is gone": (
        lambda: written("same", blocks(), gone=True),
        "and that is gone",
        {
            "the base in its place": lambda: written("same", blocks()),
            "--format bf16": lambda: written("bf16", "blocks", gone=True),
        },
    ),
    "a base with scales of its activations": (
        lambda: written("same", of_scheme("measured", quantized.fp8_tensor(".weight_scale_inv"), MEASURED)),
        "they are wrong for other weights",
        {"--format fp8": lambda: written("fp8", "measured"), "--format bf16": lambda: written("bf16", "measured")},
    ),
    "experts in one tensor, in FP8": (
        lambda: written("fp8", fused()),
        "loaders read it of the weights of single modules",
        {"--format mxfp4": lambda: written("mxfp4", fused()), "--format bf16": lambda: written("bf16", fused())},
    ),
    "a base that says nothing of its codes": (
        lambda: written("same", of_scheme("unsaid", quantized.fp8_blocks(), None)),
        "no loader knows what its codes are",
        {"--format fp8": lambda: written("fp8", "unsaid"), "--format bf16": lambda: written("bf16", "unsaid")},
    ),
    "an adapter of several ranks for engines": (
        lambda: adapter(adapter_format="per_expert", rank_pattern="v_proj=3"),
        "serving engines read one rank",
        {"--adapter_format peft": lambda: adapter(rank_pattern="v_proj=3")},
    ),
    "experts that the hub holds together, for engines": (
        lambda: adapter(recipe="gpt_oss_ep", adapter_format="per_expert"),
        "have no weights by themselves",
        {"--adapter_format peft": lambda: adapter(recipe="gpt_oss_ep")},
    ),
    "experts that PEFT would take the wrong way": (
        lambda: adapter(recipe="llama4_ep", lora_target="experts.down_proj"),
        "outside its interface",
        {
            "such as q_proj,k_proj,v_proj,o_proj": lambda: adapter(
                recipe="llama4_ep", lora_target="q_proj,k_proj,v_proj,o_proj"
            )
        },
    ),
}


@functools.cache
def blocks() -> str:
    return of_scheme("blocks", quantized.fp8_blocks(), {"quant_method": "fp8", "weight_block_size": [128, 128]})
