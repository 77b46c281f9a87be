"""Sources of LoRA factors: seeded, from files, beside the base's weights, and merged into them."""

from __future__ import annotations

import math
import zlib
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.files.folder import Folder
from shardwright.models.adapters.lora import A, B, Lora, base_of
from shardwright.models.experts.input_scaling import ScaledExperts
from shardwright.weights.peft_files import AdapterFiles, factor_shapes, open_adapter
from shardwright.weights.weight_sources import Source, part_of

if TYPE_CHECKING:  # it loads torch_xla, and an export needs no device
    from shardwright.job import Job


def seeded_factors(model: nn.Module, seed: int) -> Source:
    """A source of initial factors for ``model``, by name and seed alone: A uniform as PEFT draws it, B zero."""

    def source(name: str) -> torch.Tensor:
        shape = model.get_parameter(name).shape
        if name.endswith(B):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        bound = 1 / math.sqrt(shape[-1])  # as of nn.Linear: kaiming_uniform_ with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return source


def beside(base: Source, own: Source) -> Source:
    """A source of an adapted model: factors come from ``own``, everything else from ``base``."""
    return lambda name: (base if base_of(name) is None else own)(name)


def merge_factors(base: Source, factors: Source, lora: Lora, model: PreTrainedModel) -> Source:
    """A source of plain weights of ``model`` (on meta): ``base`` plus ``factors``, in the dtype of ``base``."""

    def source(name: str) -> Array:
        if name not in lora.targets:
            return base(name)
        weight, a, b = base(name), factors(name + A), factors(name + B)
        # stored [.., in, out]
        transposed = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))

        def read(where: Slices) -> torch.Tensor:
            *experts, rows, columns = where
            rows, columns = (columns, rows) if transposed else (rows, columns)
            part_a = a[(*experts, slice(0, a.shape[-2]), columns)].to(torch.float32)
            part_b = b[(*experts, rows, slice(0, b.shape[-1]))].to(torch.float32)
            delta = lora.scale * (part_b @ part_a)
            return (weight[where] + (delta.transpose(-1, -2) if transposed else delta)).to(weight.dtype)

        return LazyArray(tuple(weight.shape), weight.dtype, read)

    return source


def weights_of(job: Job, base: Source, saved: Source | None) -> Source:
    """The source of all weights on a run's devices, from ``base``, the starting weights under the names of the whole.

    ``saved`` has a checkpoint's weights; of an adapted model, the factors alone.
    """
    own = part_of(base, job.facts.names_in_whole)
    if job.lora is None:
        return saved or own
    if saved is None and job.args.adapter is not None:
        saved = open_adapter(Folder(job.args.adapter), job.lora, job.model, job.facts.names_in_whole)
    return beside(own, saved or seeded_factors(job.adapted, job.args.seed))


def files_of(job: Job) -> AdapterFiles:
    """The files of the job's adapter; the job must have one."""
    assert job.lora is not None
    facts, per_expert = job.facts, job.args.adapter_format == "per_expert"
    return AdapterFiles(job.lora, job.model, facts.whole, facts.names_in_whole, job.args.model, per_expert)


def check_adapter(job: Job) -> None:
    """Raises UserError early, of an adapter to start from that does not fit or a format that can't be written."""
    if job.lora is None:
        return
    for target in job.lora.targets:
        if isinstance(job.model.get_submodule(target.rpartition(".")[0]), ScaledExperts):
            raise UserError(
                asked=f"an adapter of {target}",
                found=f"experts of a {type(job.model).__name__}, which transformers keeps outside its interface",
                why="nothing tells PEFT there which dimension is the input's, and it would take the other",
                instead="a --lora_target without experts, such as q_proj,k_proj,v_proj,o_proj",
            )
    weights_of(job, lambda name: torch.empty(0), None)
    shapes = factor_shapes(job.lora, job.model)
    files_of(job).tensors(lambda name: torch.empty(shapes[name], device="meta"))
