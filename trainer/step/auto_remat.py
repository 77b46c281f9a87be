"""`remat="auto"`: the share of a layer's values that is kept for the backward, found once and cached.

The TPU's own compiler finds it (:mod:`shardwright.compile.search.remat_share`), which takes minutes and no TPU.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import nn

from shardwright.errors import command
from shardwright.files.cache import cache_path, digest
from shardwright.files.folder import Folder
from shardwright.job import Job
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.stacking import is_stacked
from shardwright.models.layers.decoder_layers import DecoderLayers
from shardwright.report.units import size

AUTO = "auto"
# the options that change the memory of a step, beside the recipe and the model
_COUNTED = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "sequence_length", "packing", "isolate_documents"),
    *("weight_dtype", "optimizer_dtype", "lora_r", "lora_target", "base_dtype", "objective", "router_balance"),
    *("optim", "optim_args", "adapter", "rank_pattern", "exclude_modules", "layers_to_transform", "modules_to_save"),
    *("lora_dropout", "use_dora", "init_lora_weights", "trainable_token_indices"),
    *("loss_type", "label_smoothing_factor", "z_loss", "neftune_noise_alpha", "teacher_top_k"),
    *("router_z_loss_coef", "router_balance_coef"),
)


@dataclass(frozen=True)
class LayerValue:
    """The output of a layer's product or kernel that the backward uses: kept from the forward, or computed again."""

    module: str  # such as model.layers.*.self_attn.q_proj
    operation: str  # such as mm or splash
    shape: tuple[int, ...]  # in one layer, on all chips together
    layers: int
    bytes: int  # of a chip's part, in all layers
    flops: int  # a chip's work in a step to compute it again, in all layers
    kept: bool

    def __str__(self) -> str:
        return f"{self.module} ({self.operation}), {size(self.bytes)}"


class Answer(NamedTuple):
    """The policy that ``auto`` means, why, and the values it keeps as far as they were noted."""

    policy: str | float
    why: str
    kept: tuple[str, ...] = ()


VALUES_HEADER = ("value of a layer", "of", "shape, all chips", "layers", "HBM a chip", "FLOPs a chip", "is")


def layer_values(job: Job, model: nn.Module) -> tuple[LayerValue, ...]:
    """The layer values of a model traced under a policy that keeps a share; first those that save most FLOPs a byte."""
    steps, found = job.args.gradient_accumulation_steps, []
    for module in model.modules():
        for value, layers in module.values if isinstance(module, DecoderLayers) else ():
            held = value.bytes * layers // _parts(job.stored, value.module)
            flops = value.flops * layers * steps // job.plan.devices
            found.append(LayerValue(value.module, value.kind, value.shape, layers, held, flops, value.kept))
    return tuple(sorted(found, key=lambda value: -value.flops / value.bytes))


def value_rows(values: Sequence[LayerValue]) -> list[tuple[str, ...]]:
    """A row under :data:`VALUES_HEADER` for each value."""
    rows: list[tuple[str, ...]] = []
    for value in values:
        shape, what = " × ".join(map(str, value.shape)), "kept" if value.kept else "computed again"
        numbers = (str(value.layers), size(value.bytes), f"{value.flops:.2e}")
        rows.append((value.module, value.operation, shape, *numbers, what))
    return rows


def _parts(plan: ShardingPlan, module: str) -> int:
    """The number of parts into which the chips split the output of ``module``."""
    weight = f"{module}.weight"
    if weight not in plan.specs:
        return plan.devices  # a kernel's
    # a product's is split by its tokens, and by its columns where its weight's output dimension is split
    packed = plan[weight].packed
    outputs = packed.used.axes_of(0) if packed else plan[weight].axes_of(1 if is_stacked(weight) else 0)
    axes = {*plan.token_axes, *outputs}
    return math.prod(plan.mesh[axis] for axis in axes)


def is_auto(job: Job) -> bool:
    return job.recipe.compute.remat == AUTO


def with_remat(job: Job, remat: str | float) -> Job:
    return replace(job, recipe=job.recipe.computing(remat=remat))


def keep_answer(job: Job, chip: str, share: float, values: Sequence[LayerValue] = ()) -> Path:
    """Cache that ``job``, which says ``auto``, fits ``chip`` with ``share``, and which of ``values`` that keeps."""
    path, content = _path(job, chip), {"share": share, "kept": [str(value) for value in values if value.kept]}
    Folder(path.parent).write(path.name, json.dumps(content).encode())
    return path


def answer(job: Job, chip: str) -> Answer:
    """The policy that ``auto`` means for ``job`` on the ``chip`` of that name; empty: unknown chip."""
    try:
        noted = json.loads(_path(job, chip).read_text())
        share, kept = noted["share"], noted.get("kept", [])
        if isinstance(share, int | float) and 0 <= share <= 1:
            return Answer(share, f"as {command('compile')} found for {chip}", tuple(map(str, kept)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):  # there is none, or none that can be read
        pass
    return Answer("full", f"nobody has asked {command('compile')} how much fits (the same options, and --topology)")


def untaken(job: Job, chip: str) -> str:
    """A line on what ``auto`` was found to be for ``job`` on ``chip``, which computes whole layers again; or empty."""
    if job.recipe.compute.remat != "full":
        return ""
    found = answer(with_remat(job, AUTO), chip)
    return "" if found.policy in ("full", 0) else f"full; --compute remat=auto is faster: {found.policy} ({found.why})"


def _path(job: Job, chip: str) -> Path:
    args = job.args.as_dict()
    content = [job.recipe.as_dict(), job.config.to_dict(), {name: args[name] for name in _COUNTED}, job.devices, chip]
    content += ["MTP layers"] if job.args.train_mtp else []  # which a config has, trained or not
    content += [job.adapter_held] if job.adapter_held else []
    return cache_path() / "remat" / f"{digest(json.loads(json.dumps(content, default=str)))}.json"
