"""One family's step against the plain model: loss and every gradient."""

import itertools
import json
import math
import re
import tempfile
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch_xla
from torch.overrides import TorchFunctionMode
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.errors import UserError, in_short
from shardwright.job import Job
from shardwright.layout.auto import auto_recipe
from shardwright.layout.plan import ShardingPlan
from shardwright.model.facts import ModelFacts, facts_of
from shardwright.model.meta_model import config_of
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.ops.labels import IGNORE
from shardwright.models.tiny import shrunk, tiny_config
from shardwright.prove import trajectory
from shardwright.prove.plain import default_dtype, eager_model, randomise
from shardwright.prove.prove_command import in_coarse, run_job
from shardwright.prove.sharded import unstacked
from shardwright.prove.small_job import small_job
from shardwright.prove.trajectory import TOLERANCES, Trajectory
from shardwright.step.build import place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.batch import place_batch
from shardwright.xla.device_mesh import build_mesh
from shardwright.xla.runtime import init_runtime

DEVICES, ROWS, LENGTH = 8, 8, 128
DTYPE: str | None = None  # of the compute; None: the devices' own
_TRIES = 5  # batches, until one has no choice that is within rounding
_ROUNDING, _MASKED = 1e-6, -1e30

Tensors = dict[str, torch.Tensor]


@dataclass
class Plain:
    """The plain model, a batch, its loss, and name → gradient of each parameter that is in the loss."""

    config: PretrainedConfig
    model: PreTrainedModel
    batch: Tensors
    loss: float
    gradients: Tensors


def plain(family: str, published: Mapping[str, Any] | None = None) -> Plain | dict[str, Any]:
    """The family's plain model and its gradients; or the verdict on a model that transformers itself can't train.

    ``published`` is a repository's config.json: its sizes are shrunk, and all else is as there.
    """
    init_runtime()
    try:
        config = tiny_config(family) if published is None else shrunk(config_of(published).get_text_config())
        model = eager_model(config)
        randomise(model)
        model.train()
        for seed in range(_TRIES):
            batch, choices = _batch(seed), Choices()
            with choices:
                loss, gradients = _gradients(model, batch)
            if choices.least > _ROUNDING:
                break
    except Exception as error:
        return {"verdict": "upstream", "cause": f"the plain model: {_where(error)[:200]}"}  # some list all model types
    return Plain(config, model, batch, loss, gradients)


class Choices(TorchFunctionMode):
    """Inside, the ``least`` distance, relative, of the last that any ``topk`` takes from the first that it leaves.

    And of what any ``relu`` is given from its bend at 0, as a part of all that it is given. Below float32's rounding a
    choice of experts or keys, or a slope, falls either way, and all that follows with it. Equals and zeros don't count:
    both sides take the same of them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.least = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.topk, torch.Tensor.topk):
            self._note(*args, **(kwargs or {}))
        elif func in (torch.relu, torch.Tensor.relu, torch.nn.functional.relu):
            given = args[0].detach().abs()
            apart = given[given > 0] / given.square().mean().sqrt()
            self.least = min(self.least, apart.min().item() if len(apart) else math.inf)
        return found

    def _note(self, values: torch.Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> None:
        if k < values.shape[dim]:
            last, left = values.detach().double().topk(k + 1, dim).values.narrow(dim, k - 1, 2).unbind(dim)
            apart = ((last - left) / last.abs())[(last > left) & (left > _MASKED)]
            self.least = min(self.least, apart.min().item() if len(apart) else math.inf)


def _batch(seed: int) -> Tensors:
    """Random tokens, and labels of which some are ignored, unevenly over rows."""
    tokens = torch.randint(3, 200, (ROWS, LENGTH), generator=torch.Generator().manual_seed(seed))
    ignored = torch.arange(LENGTH) < 2 * torch.arange(ROWS)[:, None]
    return {"input_ids": tokens, "labels": tokens.masked_fill(ignored, IGNORE)}


def _gradients(model: PreTrainedModel, batch: Tensors) -> tuple[float, Tensors]:
    extra: dict[str, Any] = {}
    if hasattr(model.config, "output_router_logits"):
        extra = {"output_router_logits": False, "attention_mask": torch.ones_like(batch["input_ids"])}
    model.zero_grad()
    loss = model(**batch, use_cache=False, **extra).loss
    loss.backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compared(case: Plain, mesh: str | None, scan: bool, with_experts: str | None = None) -> dict[str, Any]:
    """The verdict on our step: its loss and gradients against those of ``case``.

    ``with_experts`` is the mesh of a model that has them.
    """
    about: dict[str, Any] = {}
    try:
        facts = facts_of(case.config)
        job = _job(facts, (facts.experts and with_experts) or mesh, scan)
        kernels = filter(None, (job.recipe.compute.attention, job.recipe.compute.experts))
        about |= {"kind": _kind_of(job.model), "layers": _cut_of(job.stored), "kernels": ", ".join(kernels)}
        loss, gradients = _ours(job, case)
    except UserError as error:
        return {**about, "verdict": "refused", "cause": f"{error.found}: {error.why}"}
    except Exception as error:
        return {**about, "verdict": "error", "cause": f"{'' if about else 'assembling: '}{_where(error)}"}
    return {**about, **judged(case, loss, gradients)}


def _job(facts: ModelFacts, mesh: str | None, scan: bool) -> Job:
    """The job of the recipe ``auto``, without dropped tokens or router losses."""
    recipe = auto_recipe(facts.model, facts.experts, mesh, DEVICES).recipe
    exact: dict[str, Any] = {"experts": "dropless", "router_loss": False} if facts.experts else {}
    if recipe.compute.experts == "dense":
        exact = {"router_loss": False}
    recipe = recipe.computing(remat="full", scan=scan, dtype=DTYPE, **exact)
    settings = Settings(recipe=recipe.name, sequence_length=LENGTH, per_device_train_batch_size=1)
    return Job(recipe, settings, DEVICES, facts)


def _ours(job: Job, case: Plain) -> tuple[float, Tensors]:
    mesh = build_mesh(job.recipe.mesh)
    weights = {name: values.clone() for name, values in case.model.state_dict().items()}
    step = TrainStep(place_model(job, mesh, state_dict_weights(weights)))
    inputs = place_batch({k: t.unsqueeze(1) for k, t in case.batch.items()}, mesh, job.recipe.batch)
    loss, found, _ = step.loss_and_gradients(inputs, step.random_keys(1))
    torch_xla.sync()
    return loss.item(), dict(unstacked(job.stored, found))


def judged(case: Plain, loss: float, gradients: Tensors) -> dict[str, Any]:
    """Whether the loss and every gradient are those of the plain model, as far as a proof asks it of its first step."""
    if missing := [name for name in case.gradients if name not in gradients]:
        return {"verdict": "wrong", "cause": f"no gradient of {missing[0]}"}
    ours, plain = Trajectory([loss], gradients=gradients), Trajectory([case.loss], gradients=case.gradients)
    try:
        first, *of_gradients = trajectory.judged(ours, plain, lambda: _in_float64(case))
    except Exception as error:
        return {"verdict": "wrong", "cause": f"float64 can't be tried: {_where(error)}"}
    worst = max(of_gradients, key=lambda each: each.off)
    result = {"loss": first.off, "worst": worst.off, "where": worst.name, "verdict": "pass"}
    beyond = sorted((each for each in of_gradients if not each.good), key=lambda each: -each.off)
    if beyond or not first.good:
        names = ", ".join(each.name for each in beyond[:6])
        return {**result, "verdict": "wrong", "cause": f"{len(beyond)} of {len(of_gradients)} gradients: {names}"}
    if worst.off > TOLERANCES["gradient"][0]:
        result["cause"] = f"float32's own rounding allows {worst.allowed:.0e} there"
    return result


def _in_float64(case: Plain) -> Trajectory:
    with default_dtype(torch.float64):
        loss, gradients = _gradients(case.model.double(), case.batch)
    case.model.float()
    return Trajectory([loss], gradients=gradients)


def proved(
    family: str, published: Mapping[str, Any] | None, mesh: str | None, with_experts: str | None
) -> dict[str, Any]:
    """The verdict of `prove --bf16` on the first step, of a run of the model at its own size by the recipe ``auto``."""
    init_runtime()
    about: dict[str, Any] = {}
    try:
        config = tiny_config(family).to_dict() if published is None else dict(published)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, "config.json")
            file.write_text(json.dumps(config))
            facts = facts_of(config_of(config).get_text_config())
            mesh = (facts.experts and with_experts) or mesh
            small = small_job(run_job(TrainingArguments(recipe="auto", model=str(file), mesh=mesh, bf16=True), DEVICES))
        about |= {"kind": _kind_of(small.job.model), "layers": _cut_of(small.job.stored)}
        loss, *of_gradients = in_coarse(small)
    except UserError as error:
        return {**about, "verdict": "refused", "cause": f"{error.found}: {error.why}"}
    except Exception as error:
        return {**about, "verdict": "error", "cause": _where(error)}
    worst = max(of_gradients, key=lambda each: each.share)
    result = about | {"loss": loss.off, "worst": worst.off, "where": worst.name, "allowed": worst.allowed}
    beyond = [each for each in (loss, *of_gradients) if not each.good]
    names = ", ".join(f"{each.quantity} {each.name}" for each in beyond[:6])
    return result | ({"verdict": "wrong", "cause": f"{len(beyond)} off: {names}"} if beyond else {"verdict": "pass"})


def _cut_of(plan: ShardingPlan) -> str:
    """The decoder's layers as stored: ``1 + 4 × 2`` is a layer and then a period of four, twice.

    In names a stack has its layers' slice as number, ``1:9:4``, or ``*`` for all.
    """
    lists: dict[str, dict[str, int]] = {}
    sizes: Counter[str] = Counter()
    for parameter in plan.parameters:
        if found := re.match(r"(.*?)\.(\*|\d+:\d+(?::\d+)?|\d+)\.", parameter.name):
            lists.setdefault(found[1], {})[found[2]] = len(plan.members(parameter.name))
            sizes[found[1]] += math.prod(parameter.shape)
    stored = lists[sizes.most_common(1)[0][0]] if lists else {}
    text: list[str] = []
    for (period, count), layers in itertools.groupby(stored.items(), _period):
        text.append(f"{period} × {count}" if count > 1 else str(len(list(layers))))
    return " + ".join(text)


def _period(stored: tuple[str, int]) -> tuple[int, int]:
    """(period, repetitions) of layers stored under such a number; (1, 1) for a single layer."""
    number, count = stored
    return int(number.split(":")[2]) if count > 1 and number.count(":") == 2 else 1, count


def _kind_of(model: PreTrainedModel) -> str:
    """The kind of layers in words: experts or dense; and hybrid if not only attention mixes tokens."""
    classes = " ".join({type(module).__name__ for module in model.modules()})
    mixers = r"Mamba|DeltaNet|DeltaAttention|LinearAttention|Lightning|Recurrent|ShortConv|Rwkv|xLSTM"
    sparse = experts_modules(model) or re.search(r"MoE|Moe[A-Z]|Experts", classes)
    return ("experts" if sparse else "dense") + (", hybrid" if re.search(mixers, classes) else "")


def _where(error: Exception) -> str:
    place = traceback.extract_tb(error.__traceback__)[-1]
    return f"{in_short(error)} ({Path(place.filename).name}:{place.lineno})"
