"""Weights in, a parameter at a time, from a seed or a checkpoint onto the devices; and out in the hub's format."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch_xla.distributed.spmd as xs
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from trainer import sharding
from trainer.errors import UserError
from trainer.plan import ShardingPlan, partition_spec

# the model's own (unstacked) parameter or buffer name -> its values on the CPU
Source = Callable[[str], sharding.Array]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """The model's own random init, a module at a time, each from a seed of its own.

    So the values depend on neither mesh nor order, and the host holds one module. ``model`` is on meta and stays so.
    """

    def source(name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{owner}".encode()))
            model._init_weights(module)
        return getattr(module, key).detach()

    return source


def checkpoint_weights(model: str, config: PretrainedConfig) -> Source:
    """The weights of a hub checkpoint (folder or id), by transformers' own loader.

    Raises:
        UserError: the files can't be read, or do not fit the config.
    """
    try:
        result: Any = AutoModelForCausalLM.from_pretrained(
            model, config=config, dtype=torch.float32, output_loading_info=True, ignore_mismatched_sizes=True
        )
    except Exception as error:  # the loader raises many kinds; each is about these files
        raise UserError(
            asked=f"--model {model}",
            found=f"{type(error).__name__}: {error}",
            why="its weights could not be loaded",
            instead="a folder or hub id with a config.json and matching safetensors files",
        ) from error
    loaded, report = result
    missing = sorted({*report["missing_keys"], *(name for name, *_ in report["mismatched_keys"])})
    if missing:
        raise UserError(
            asked=f"--model {model}",
            found=f"{len(missing)} parameters missing or of another shape: {', '.join(missing[:8])}",
            why="training would start from random values there without a word",
            instead="the config.json that the weights were saved with",
        )
    tensors = loaded.state_dict()
    return lambda name: tensors[name]


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """The values of a state dict with the model's own names."""
    return lambda name: tensors[name].detach()


def place_parameters(model: nn.Module, plan: ShardingPlan, mesh: xs.Mesh, source: Source) -> dict[str, torch.Tensor]:
    """Fill ``model`` (on meta, perhaps stacked) from ``source``, each parameter laid out by ``plan``, in one pass.

    Tied parameters stay tied; buffers are replicated. Returns name -> parameter, in the model's order.
    """
    placed: dict[str, torch.Tensor] = {}
    for entry in plan.parameters:
        members = plan.members(entry.name)
        values = source(entry.name) if members == [entry.name] else sharding.Stack([source(name) for name in members])
        spec = partition_spec(entry.layout, len(entry.shape), tuple(plan.mesh))
        placed[entry.name] = nn.Parameter(sharding.place(entry.name, values, mesh, spec, entry.dtype))
        _assign(model, entry.name, placed[entry.name])
    for alias, name in plan.aliases.items():
        _assign(model, alias, placed[name])
    for name, buffer in list(model.named_buffers()):
        owner, _, key = name.rpartition(".")
        replicated = sharding.place(name, buffer.cpu(), mesh, (None,) * buffer.dim())
        model.get_submodule(owner)._buffers[key] = replicated
    return placed


def unstacked(plan: ShardingPlan, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(the model's own name, values on the CPU), one placed parameter at a time."""
    for name, parameter in parameters.items():
        members = plan.members(name)
        value = sharding.fetch(parameter.detach())
        yield from zip(members, value.unbind() if members != [name] else [value], strict=True)


def export(
    folder: Path,
    model: PreTrainedModel,
    plan: ShardingPlan,
    parameters: Mapping[str, torch.Tensor],
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Write the hub's format, names and shapes: safetensors, config, generation config, tokenizer.

    Args:
        model: the plain (unstacked) model on meta, whose class knows the hub's names.
    """
    tensors = {name: value.contiguous() for name, value in unstacked(plan, parameters)}
    tensors |= {alias: tensors[name] for alias, name in plan.aliases.items()}
    model.load_state_dict(tensors, strict=True, assign=True)
    model.tie_weights()
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)


def _assign(model: nn.Module, name: str, parameter: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, parameter)
