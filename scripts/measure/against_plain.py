"""One family's step against the plain model: loss and every gradient."""

from __future__ import annotations

import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
from tiny import tiny_config
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from trainer.arguments import TrainingArguments
from trainer.errors import UserError
from trainer.job import Job
from trainer.layout.mesh import Mesh
from trainer.layout.placement import Shard
from trainer.layout.recipe import Compute, Layout, Recipe
from trainer.model import experts_modules, in_short, meta_model
from trainer.step.build import build
from trainer.weights.sources import state_dict_weights
from trainer.xla import sharding
from trainer.xla.batch import place_batch
from trainer.xla.mesh import build_mesh
from trainer.xla.runtime import init_runtime

ROWS, LENGTH = 8, 32
TOLERANCE = 1e-5

Tensors = dict[str, torch.Tensor]


@dataclass
class Plain:
    """The plain model, a batch, and what it gives: the loss, and name → gradient (None where the loss lacks it)."""

    config: PretrainedConfig
    model: PreTrainedModel
    batch: Tensors
    loss: float
    gradients: dict[str, torch.Tensor | None]


def plain(family: str) -> Plain | dict[str, Any]:
    """The family's plain model and its gradients; or the result of a model that transformers itself can't train."""
    init_runtime()
    try:
        config = tiny_config(family)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.set_attn_implementation("eager")
        if experts_modules(model):
            model.set_experts_implementation("eager")
        _randomise(model)
        batch = _batch(config)
        loss, gradients = _gradients(model.train(), batch)
    except Exception as error:
        return {"verdict": "upstream", "cause": f"the plain model: {_where(error)}"}
    return Plain(config, model, batch, loss, gradients)


def _randomise(model: PreTrainedModel) -> None:
    """Random weights: matrices by their fan-in, so that every layer counts; all else moved off its first value."""
    saved = model.state_dict().keys()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn_like(parameter)
            if parameter.dim() > 1 and (not parameter.any() or parameter.mean().abs() < parameter.std()):
                parameter.copy_(noise * parameter.shape[-1] ** -0.5)
            else:
                parameter.add_(noise / 10)
        for name, buffer in model.named_buffers():
            if name in saved and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) / 10)
    model.tie_weights()


def _batch(config: PretrainedConfig) -> Tensors:
    """Random tokens; some targets are not scored, unevenly over rows."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(3, 200, (ROWS, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    return {"input_ids": tokens, "labels": labels}


def _gradients(model: PreTrainedModel, batch: Tensors) -> tuple[float, dict[str, torch.Tensor | None]]:
    extra: dict[str, Any] = {}
    if hasattr(model.config, "output_router_logits"):
        extra = {"output_router_logits": False, "attention_mask": torch.ones_like(batch["input_ids"])}
    model.zero_grad()
    loss = model(**batch, use_cache=False, **extra).loss
    loss.backward()
    found = {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}
    return loss.item(), found


def generic_recipe(model: PreTrainedModel) -> Recipe:
    """Experts over ``expert``; everything else over ``fsdp``, along the first dimension that it divides."""
    experts = experts_modules(model)
    mesh = Mesh(fsdp=2, expert=4) if experts else Mesh(fsdp=8)
    lines: dict[str, Layout] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.rpartition(".")[0] in experts
        dims = [d for d, size in enumerate(parameter.shape) if size % (2 if experts else 8) == 0 and not (inside and d == 0)]
        layout: Layout = {"fsdp": Shard(dims[0])} if dims else {}
        lines[name] = {**layout, "expert": Shard(0)} if inside else layout
    batch = tuple(mesh.axes)
    return Recipe(mesh, batch, lines, compute=Compute(remat="full", experts="dropless" if experts else None), name="generic")


def compared(case: Plain, scan: bool) -> dict[str, Any]:
    """The result of our step: its loss and gradients against those of ``case``."""
    from dataclasses import replace

    try:
        meta = meta_model(case.config)
        recipe = generic_recipe(meta)
        recipe = replace(recipe, compute=replace(recipe.compute, scan=scan))
        args = TrainingArguments(recipe="generic", sequence_length=LENGTH, per_device_train_batch_size=1)
        job = Job(recipe, args, 8, case.config, meta)
    except UserError as error:
        return {"verdict": "refused", "cause": f"{error.found}: {error.why}"}
    except Exception as error:
        return {"verdict": "error", "cause": f"assembling: {_where(error)}"}
    about = {
        "layers": cut_of([p.name for p in job.stored.parameters]),
        "experts": recipe.compute.experts or "",
        "parameters": job.parameters,
    }
    try:
        loss, gradients = _ours(job, case)
    except UserError as error:
        return {**about, "verdict": "refused", "cause": f"{error.found}: {error.why}"}
    except Exception as error:
        return {**about, "verdict": "error", "cause": _where(error)}
    return {**about, **judged(case, loss, gradients)}


def _ours(job: Job, case: Plain) -> tuple[float, Tensors]:
    mesh = build_mesh(job.recipe.mesh)
    weights = {name: values.clone() for name, values in case.model.state_dict().items()}
    step = build(job, mesh, state_dict_weights(weights)).step
    inputs = place_batch({k: t.unsqueeze(1) for k, t in case.batch.items()}, mesh, job.recipe.batch)
    loss, found, _ = step.loss_and_gradients(inputs, step.random_keys(1))
    torch_xla.sync()
    gradients: Tensors = {}
    for name, gradient in found.items():
        values, members = sharding.fetch(gradient.detach()), job.stored.members(name)
        gradients |= dict(zip(members, values.unbind() if members != [name] else [values], strict=True))
    return loss.item(), gradients


def judged(case: Plain, loss: float, gradients: Tensors) -> dict[str, Any]:
    """Whether the loss and every gradient are those of the plain model, to :data:`TOLERANCE`.

    A gradient that is further off passes if the plain model's own, in float32, is as far off from float64.
    """
    missing = [name for name, g in case.gradients.items() if g is not None and name not in gradients]
    if missing:
        return {"verdict": "wrong", "cause": f"no gradient of {missing[0]}"}
    off = differences(gradients, case.gradients)
    worst, where = max((value, name) for name, value in off.items())
    loss_off = abs(loss - case.loss) / abs(case.loss)
    result = {"loss": loss_off, "worst": worst, "where": where}
    if max(worst, loss_off) <= TOLERANCE:
        return {**result, "verdict": "pass"}
    try:
        _, exact = _gradients(case.model.double(), case.batch)
        own = differences({k: g.double() for k, g in case.gradients.items() if g is not None}, exact)
    except Exception as error:
        return {**result, "verdict": "wrong", "cause": f"float64 can't be tried: {_where(error)}"}
    finally:
        case.model.float()
    beyond = {k: v for k, v in off.items() if v > max(TOLERANCE, 4 * own.get(k, 0.0))}
    if beyond or not loss_off <= TOLERANCE:
        names = sorted(beyond, key=lambda k: -beyond[k])
        return {**result, "verdict": "wrong", "cause": f"{len(names)} of {len(off)} gradients: {', '.join(names[:6])}"}
    return {**result, "verdict": "pass", "cause": f"float32's own rounding there: {own[where]:.0e}"}


def differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor | None]) -> dict[str, float]:
    """Name → relative difference (2-norm). One of no gradient, or nearly none, is taken relative to all together."""
    total = sum(g.double().square().sum().item() for g in theirs.values() if g is not None) ** 0.5
    found = {}
    for name, gradient in theirs.items():
        if name not in ours:
            continue
        expected = torch.zeros_like(ours[name]) if gradient is None else gradient
        off = (ours[name].double() - expected.double()).norm().item()
        found[name] = off / max(expected.double().norm().item(), 1e-6 * total)
        if found[name] != found[name]:
            found[name] = float("inf")
    return found


def cut_of(names: list[str]) -> str:
    """How the decoder's layers are stored, from the parameters' names: ``1 + 2 × 4`` is a layer and four periods."""
    parts: dict[str, None] = {}
    for name in names:
        if found := re.search(r"\.(\*|\d+:\d*:\d+|\d+)\.", name):
            parts[found[1]] = None
    return " ".join(parts)


def _where(error: BaseException) -> str:
    """An error on one line, with the place that raised it."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_short(error) if isinstance(error, Exception) else error} ({place.filename.split('/')[-1]}:{place.lineno})"[:500]
