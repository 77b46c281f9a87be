"""A recipe on a small model beside the plain transformers model: eager, unsharded, dropless, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch_xla
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.recipe import Recipe
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import scores_texts
from shardwright.models.experts.expert_families import experts_modules
from shardwright.prove import trajectory
from shardwright.prove.sharded import unstacked
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.eval_step import EvalStep
from shardwright.step.train_step import TrainStep
from shardwright.weights.weight_sources import state_dict_weights
from shardwright.xla.batch import place_batch
from shardwright.xla.device_mesh import build_mesh
from tests.support.jobs import job_of
from tests.support.paths import ROOT

Gradients = tuple[float, dict[str, torch.Tensor]]  # and the loss before them

ROWS, LENGTH = 16, 16
# Layers one by one, as torch runs them: most of the time of a test is to trace a scan or a layer that is recomputed.
PLAIN_LAYERS = {"scan": False, "remat": "none"}
SMALL = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
RECIPES = tuple(path.stem for path in sorted((ROOT / "recipes").glob("[!_]*.py")))
# Where layers differ, more of them, for each kind to come twice, though fewer at a time than the models have; and
# windows and chunks shorter than a row.
PATTERNS = {
    "gpt_oss": {"num_hidden_layers": 4, "sliding_window": 8},
    "deepseek_v3": {"num_hidden_layers": 3},
    "qwen3_next": {"num_hidden_layers": 4, "full_attention_interval": 2},
    "gemma3_text": {"num_hidden_layers": 4, "sliding_window_pattern": 2, "sliding_window": 8},
    "llama4_text": {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 0], "attention_chunk_size": 8},
}


@dataclass
class Case:
    """A recipe on a small model: the reference on the CPU, and our step with the same weights on 8 devices."""

    recipe: Recipe
    config: PretrainedConfig
    reference: PreTrainedModel
    plan: ShardingPlan
    step: TrainStep
    evaluation: EvalStep
    mesh: Any

    def gradients(self, batch: dict[str, torch.Tensor], step: int = 1) -> Gradients:
        """Our loss and gradients, under the model's own names, on the CPU; what is random is that of ``step``."""
        split = {k: t.reshape(-1, self.step.accumulation, *t.shape[1:]) for k, t in batch.items()}
        inputs = place_batch(split, self.mesh, self.recipe.batch)
        loss, found, _ = self.step.loss_and_gradients(inputs, self.step.random_keys(step))
        torch_xla.sync()
        return loss.item(), dict(unstacked(self.plan, found))

    def first_step(self, batch: dict[str, torch.Tensor], learning_rate: float = 3e-4) -> tuple[float, dict[str, Any]]:
        """Take AdamW's first step; return its loss, and the clipped gradients, which its first moments are a tenth of.

        The graph of a whole step is traced, as a run traces it, and :meth:`gradients` would trace most of it again.
        """
        self.step(batch, step=1, learning_rate=learning_rate)
        tenths = {name: moments[0] for name, moments in self.step.moments.items()}
        found = {name: values / 0.1 for name, values in unstacked(self.plan, tenths)}
        return self.step.read_metrics().loss, found

    def parameters(self) -> dict[str, torch.Tensor]:
        """Our weights now, under the model's own names, on the CPU."""
        return dict(unstacked(self.plan, self.step.parameters))

    def reference_gradients(self, batch: dict[str, torch.Tensor]) -> Gradients:
        self.reference.zero_grad()
        loss = reference_loss(self.reference, batch, router_loss=self.recipe.compute.router_loss)
        said, found = backward(loss, self.reference)
        return said, {name: gradient.clone() for name, gradient in found.items()}

    def clipped_reference_gradients(self, batch: dict[str, torch.Tensor]) -> Gradients:
        """The reference's loss, and its gradients as `torch.nn.utils.clip_grad_norm_` leaves them at a limit of 1."""
        loss, found = self.reference_gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.reference.parameters(), 1.0)
        return loss, {k: p.grad.clone() for k, p in self.reference.named_parameters() if k in found}


def small_config(recipe: Recipe, **changes: Any) -> PretrainedConfig:
    own = dict(recipe.model or {})
    pattern = PATTERNS.get(own["model_type"], {})
    # half the heads, where a mesh still divides them: attention's tiles of 128 x 128 are most of what a step computes
    names = ("num_attention_heads", "num_key_value_heads")
    heads = {name: own[name] // 2 for name in names if recipe.mesh.axes.get("tensor", 1) <= 2}
    return AutoConfig.for_model(**{**own, **SMALL, **heads, **pattern, **changes})


def one_layer(recipe: Recipe | str, **changes: Any) -> PretrainedConfig:
    """The small config with one layer, for tests whose subject is no loop over layers."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    return small_config(recipe, **{"num_hidden_layers": 1, **changes})


def make_case(
    recipe: Recipe | str,
    config: PretrainedConfig | None = None,
    *,
    accumulation: int = 1,
    mesh: str | None = None,
    weight_decay: float = 0.1,
    more: Mapping[str, Any] = MappingProxyType({}),
    **compute: Any,
) -> Case:
    """``compute`` overrides fields of the recipe's Compute, ``more`` options; capacity grows until nothing can drop."""
    recipe = load_recipe(recipe) if isinstance(recipe, str) else recipe
    recipe = recipe.with_mesh(mesh) if mesh else recipe
    config = config or small_config(recipe)
    reference = plain_model(config)
    routing = facts_of(config).routing
    if compute.get("experts", recipe.compute.experts) == "capacity" and routing is not None:
        compute = {"capacity_factor": routing[1] / routing[0], **compute}
    recipe = recipe.computing(**compute)
    options = {"gradient_accumulation_steps": accumulation, "weight_decay": weight_decay, **more}
    job, device_mesh = job_of(recipe, config, **options), build_mesh(recipe.mesh)
    weights = {name: values.clone() for name, values in reference.state_dict().items()}
    placed = place_model(job, device_mesh, state_dict_weights(weights))
    step, evaluation = TrainStep(placed), evaluation_step(placed)
    return Case(recipe, config, reference, job.stored, step, evaluation, device_mesh)


def plain_model(config: PretrainedConfig) -> PreTrainedModel:
    """transformers' own model, eager, of seeded weights of which none is where transformers starts it."""
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if scores_texts(config) else AutoModelForCausalLM
    model = kind.from_config(config, dtype=torch.float32)
    model.set_attn_implementation("eager")
    if experts_modules(model):  # others know one way to run them
        model.set_experts_implementation("eager")
    randomise(model)
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Moves biases, norms and saved buffers from where transformers starts them: a wrong layout of zeros shows not."""
    saved = model.state_dict().keys()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved and buffer.is_floating_point()]
    small = [p for name, p in model.named_parameters() if p.dim() < 2 or name.endswith("bias")]
    for tensor in (*small, *buffers):
        tensor.add_(0.1 * torch.randn_like(tensor))
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):  # a state that is forgotten at once has gradients of rounding alone
            parameter.sub_(3)


def make_batch(config: PretrainedConfig, seed: int = 0, rows: int = ROWS) -> dict[str, torch.Tensor]:
    """``rows`` x LENGTH random tokens; some targets are not scored, unevenly over rows."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, config.vocab_size, (rows, LENGTH), generator=generator)
    labels = tokens.clone()
    for row in range(rows):
        labels[row, : row // 2] = -100
    return {"input_ids": tokens, "labels": labels}


def reference_loss(model: PreTrainedModel, batch: dict[str, torch.Tensor], *, router_loss: bool) -> torch.Tensor:
    extra: dict[str, Any] = {}
    if hasattr(model.config, "output_router_logits"):
        extra = {"output_router_logits": router_loss, "attention_mask": torch.ones_like(batch["input_ids"])}
    return model(**batch, use_cache=False, **extra).loss


def says(by_token: torch.Tensor) -> Callable[..., Any]:
    """A model that says of the next token what the last one is."""
    return lambda input_ids, **_: SimpleNamespace(logits=by_token[input_ids])


def relative(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest relative difference (2-norm) of any tensor, infinite for a NaN, and its name."""
    assert ours.keys() == theirs.keys(), ours.keys() ^ theirs.keys()
    return max((trajectory.relative(ours[k], theirs[k]), k) for k in theirs)


def check_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    worst, name = relative(ours, theirs)
    assert worst < tolerance, f"{name} is off by {worst}"


def check_step(found: Gradients, expected: Gradients, tolerance: float = 1e-5) -> None:
    """Loss and gradients are those of the reference."""
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    check_near(found[1], expected[1], tolerance)


def backward(loss: torch.Tensor, model: nn.Module) -> Gradients:
    """The loss, and its gradients, which ``model`` then has."""
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def after_steps(case: Case, steps: int, **more: Any) -> tuple[float, str]:
    """Our weights after :func:`train_both` against the reference's."""
    train_both(case, steps, **more)
    return relative(case.parameters(), dict(case.reference.named_parameters()))


def train_both(case: Case, steps: int, learning_rate: float = 3e-4, taken: int = 0, rows: int = ROWS) -> None:
    """``steps`` AdamW steps of ours, and as many of `torch.optim.AdamW` with `clip_grad_norm_` on the reference.

    Of ours the first ``taken`` are taken already.
    """
    decayed = case.step.optimizer.decay
    stored = {name: p for entry in case.plan.parameters for name in case.plan.members(entry.name) for p in [entry.name]}
    named = list(case.reference.named_parameters())
    groups = [
        {"params": [p for n, p in named if stored[n] in decayed], "weight_decay": case.step.optimizer.weight_decay},
        {"params": [p for n, p in named if stored[n] not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=learning_rate)
    for i in range(steps):
        batch = make_batch(case.config, i, rows)
        if i >= taken:
            case.step(batch, step=i + 1, learning_rate=learning_rate)
        optimizer.zero_grad()
        reference_loss(case.reference, batch, router_loss=case.recipe.compute.router_loss).backward()
        torch.nn.utils.clip_grad_norm_(case.reference.parameters(), 1.0)
        optimizer.step()
