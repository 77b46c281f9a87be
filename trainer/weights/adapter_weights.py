"""LoRA adapters: as the start of a run, merged into plain weights, and as what a run has on its devices."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.arrays import Array, Slices
from shardwright.files.folder import Folder
from shardwright.models.adapters.lora import A, B, Lora, base_of
from shardwright.models.experts.input_scaling import ScaledExperts
from shardwright.weights.peft_files import AdapterFiles, factor_shapes, open_adapter
from shardwright.weights.weight_sources import Source, part_of

if TYPE_CHECKING:  # it loads torch_xla, and an export needs no device
    from shardwright.job import Job


def seeded_factors(model: nn.Module, seed: int) -> Source:
    """A source of the factors that a run starts with: A uniform as PEFT draws it, B zero, so that nothing changes.

    Each factor's values depend on its name and the seed alone.

    Args:
        model: with factors, on meta.
    """

    def source(name: str) -> torch.Tensor:
        shape = model.get_parameter(name).shape
        if name.endswith(B):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        bound = 1 / math.sqrt(shape[-1])  # nn.Linear's: kaiming_uniform_ with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return source


def beside(base: Source, own: Source) -> Source:
    """A source of an adapted model: factors come from ``own``, everything else from ``base``."""
    return lambda name: (base if base_of(name) is None else own)(name)


def merged(base: Source, factors: Source, lora: Lora, model: PreTrainedModel) -> Source:
    """A source of plain weights: those of ``base`` plus what ``factors`` add, in the dtype of ``base``.

    Args:
        model: transformers' own, whose weights they are; on meta.
    """
    targets = frozenset(lora.targets)

    def source(name: str) -> Array:
        if name not in targets:
            return base(name)
        turned = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))
        return _Merged(base(name), factors(name + A), factors(name + B), lora.scale, turned)

    return source


@dataclass(frozen=True)
class _Merged:
    """A weight plus scale·B·A, as an array; ``turned``: the weight is stored [.., in, out]."""

    base: Array
    a: Array
    b: Array
    scale: float
    turned: bool

    @property
    def shape(self) -> Sequence[int]:
        return self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        *experts, rows, columns = where
        rows, columns = (columns, rows) if self.turned else (rows, columns)
        a = self.a[(*experts, slice(0, self.a.shape[-2]), columns)].to(torch.float32)
        b = self.b[(*experts, rows, slice(0, self.b.shape[-1]))].to(torch.float32)
        delta = self.scale * (b @ a)
        return (self.base[where] + (delta.transpose(-1, -2) if self.turned else delta)).to(self.dtype)


def weights_of(job: Job, base: Source, saved: Source | None) -> Source:
    """The source of all weights that a run has on its devices.

    Args:
        base: of what the run started from, under the names of ``job.facts.whole``.
        saved: a checkpoint to go on from. Of an adapted model it holds the factors alone.
    """
    own = part_of(base, job.facts.names_in_whole)
    if job.lora is None:
        return saved or own
    start = None if saved is not None or job.args.adapter is None else Folder(job.args.adapter)
    if start is not None:
        saved = open_adapter(start, job.lora, job.model, job.facts.names_in_whole)
    return beside(own, saved or seeded_factors(job.adapted, job.args.seed))


def files_of(job: Job) -> AdapterFiles:
    """What the files of the job's adapter are. The job has one."""
    assert job.lora is not None
    per_expert = job.args.adapter_format == "per_expert"
    return AdapterFiles(job.lora, job.model, job.facts.whole, job.facts.names_in_whole, job.args.model, per_expert)


def check_adapter(job: Job) -> None:
    """Refuse what could only fail later: an adapter to start from that does not fit, a format that can't be written.

    Raises:
        UserError: as :func:`open_adapter` and :class:`AdapterFiles`.
    """
    if job.lora is not None:
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
