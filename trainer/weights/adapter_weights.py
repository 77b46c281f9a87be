"""Sources of LoRA factors: seeded, from files, beside the base's weights, and merged into them."""

from __future__ import annotations

import functools
import math
import zlib
from collections.abc import Collection
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError, a_type
from shardwright.files.arrays import Array, Slices, mapped, shaped_like, whole
from shardwright.files.folder import Folder
from shardwright.models.adapters.lora import A0, B0, A, B, Lora, M, T, base_of
from shardwright.models.experts.input_scaling import ScaledExperts
from shardwright.weights.peft_files import AdapterFiles
from shardwright.weights.peft_layout import factor_shapes, unstarted
from shardwright.weights.peft_read import open_adapter
from shardwright.weights.weight_sources import Source, part_of

if TYPE_CHECKING:  # it loads torch_xla, and an export needs no device
    from shardwright.job import Job


def seeded_factors(model: nn.Module, lora: Lora, seed: int, base: Source, gaussian: bool = False) -> Source:
    """A source of what ``lora`` in ``model`` begins as, by name, seed and the weights ``base`` alone.

    As PEFT has it: A uniform or ``gaussian``, B zero; with a start of its own the parts of the weight that it names;
    DoRA's M the lengths of the weight's rows; and what is trained whole, or T's rows of it, the weight itself.
    """
    begun = functools.cache(lambda target: _parts(lora, target, whole(base(target)).float(), seed))

    def source(name: str) -> Array:
        target = base_of(name)
        if target is None:
            return base(name)
        if name.endswith(T):
            weight = base(target)
            rows = [weight[row : row + 1, slice(0, weight.shape[1])] for row in dict(lora.tokens)[target]]
            return torch.cat(rows)
        if name.endswith(M):
            return whole(base(target)).float().norm(dim=1)
        if lora.start:
            return begun(target)[name.endswith((B, B0))]
        shape = model.get_parameter(name).shape
        if name.endswith(B):
            return torch.zeros(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}/{name}".encode()))
        if gaussian:
            return torch.empty(shape).normal_(std=1 / lora.rank(target), generator=generator)
        bound = 1 / math.sqrt(shape[-1])  # as of nn.Linear: kaiming_uniform_ with a = sqrt(5)
        return torch.empty(shape).uniform_(-bound, bound, generator=generator)

    return source


def _parts(lora: Lora, target: str, weight: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B at the start of ``weight``, the float32 weight ``target`` [out, in]: parts of it."""
    r = lora.rank(target)
    if lora.start == "olora":
        q, upper = torch.linalg.qr(weight)
        return upper[:r].contiguous(), q[:, :r].contiguous()
    if lora.start == "pissa":
        u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    else:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(zlib.crc32(f"{seed}/{target}".encode()))
            u, s, v = torch.svd_lowrank(weight, r, niter=int(lora.start.rpartition("_")[2]))
        vh = v.T
    root = (s[:r] / lora.scale(target)).sqrt()
    return root[:, None] * vh[:r], u[:, :r] * root


def beside(base: Source, own: Source, trained: Collection[str] = ()) -> Source:
    """A source of an adapted model: factors and the ``trained`` come from ``own``, everything else from ``base``."""
    return lambda name: (base if base_of(name) is None and name not in trained else own)(name)


def merge_factors(base: Source, factors: Source, lora: Lora, model: PreTrainedModel) -> Source:
    """A source of plain weights of ``model`` (on meta): ``base`` plus ``factors``, in the dtype of ``base``."""
    factors, lora = unstarted(factors, lora), lora.unstarted
    rows_of = dict(lora.tokens)

    def source(name: str) -> Array:
        weight = base(name)
        if name in lora.whole:
            return mapped(factors(name), lambda part: part, weight.dtype)
        if name in rows_of:
            own, numbers = factors(name + T), rows_of[name]

            def replaced(where: Slices) -> torch.Tensor:
                part, (rows, columns) = weight[where].clone(), where
                for number, row in enumerate(numbers):
                    if rows.start <= row < rows.stop:
                        part[row - rows.start] = own[number : number + 1, columns][0].to(part.dtype)
                return part

            return shaped_like(weight, replaced)
        if name not in lora.targets:
            return weight
        a, b = factors(name + A), factors(name + B)
        # stored [.., in, out]
        transposed = bool(getattr(model.get_submodule(name.rpartition(".")[0]), "is_transposed", False))

        def read(where: Slices) -> torch.Tensor:
            *experts, rows, columns = where
            rows, columns = (columns, rows) if transposed else (rows, columns)
            part_a = a[(*experts, slice(0, a.shape[-2]), columns)].to(torch.float32)
            part_b = b[(*experts, rows, slice(0, b.shape[-1]))].to(torch.float32)
            delta = lora.scale(name) * (part_b @ part_a)
            return weight[where] + (delta.transpose(-1, -2) if transposed else delta)

        def lengthened(where: Slices) -> torch.Tensor:
            rows, columns = where
            merged = read((rows, slice(0, weight.shape[1])))
            length = whole(factors(name + M))[rows].to(torch.float32) / merged.norm(dim=1)
            return length[:, None] * merged[:, columns]

        made = lengthened if lora.dora else read
        return shaped_like(weight, lambda where: made(where).to(weight.dtype))

    return source


def weights_of(job: Job, base: Source, saved: Source | None) -> Source:
    """The source of all weights on a run's devices, from ``base``, the starting weights under the names of the whole.

    ``saved`` has a checkpoint's weights; of an adapted model, the factors alone.
    """
    own, lora = part_of(base, job.facts.names_in_whole), job.lora
    if lora is None:
        return saved or own
    if saved is None:
        gaussian = job.args.init_lora_weights == "gaussian"
        saved = first = seeded_factors(job.adapted, lora, job.args.seed, own, gaussian)
        if job.args.adapter is not None:
            opened = open_adapter(Folder(job.args.adapter), lora, job.model, job.facts.names_in_whole, job.facts.whole)
            own = opened.checked(own)
            saved = lambda name: (first if name.endswith((A0, B0)) else opened)(name)  # noqa: E731
    return beside(own, saved, lora.whole)


def files_of(job: Job) -> AdapterFiles:
    """The files of the job's adapter; the job must have one."""
    assert job.lora is not None
    facts, per_expert = job.facts, job.args.adapter_format == "per_expert"
    return AdapterFiles(job.lora, job.model, facts.whole, facts.names_in_whole, job.base, per_expert)


def check_adapter(job: Job) -> None:
    """Raises UserError early, of an adapter to start from that does not fit or a format that can't be written."""
    if job.lora is None:
        return
    for target in job.lora.targets:
        if isinstance(job.model.get_submodule(target.rpartition(".")[0]), ScaledExperts):
            raise UserError(
                asked=f"an adapter of {target}",
                found=f"experts of {a_type(job.model)}, which transformers keeps outside its interface",
                why="nothing tells PEFT there which dimension is the input's, and it would take the other",
                instead="a --lora_target without experts, such as q_proj,k_proj,v_proj,o_proj",
            )
    weights_of(job, lambda name: torch.empty(0), None)
    shapes = factor_shapes(job.lora, job.model)
    files_of(job).tensors(lambda name: torch.empty(shapes[name], device="meta"))
