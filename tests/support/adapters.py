"""A recipe with LoRA on a small model beside PEFT's own on the plain model, with the same factors, on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model

from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.model.peft_config import as_config
from shardwright.models.adapters.lora import A0, B0
from shardwright.models.adapters.packings.registry import PACKINGS
from shardwright.models.layers.decoder_layers import number_layers
from shardwright.models.ops import random_bits, randomness
from shardwright.models.ops.labels import scored_tokens
from shardwright.step.build import evaluation_step, place_model
from shardwright.step.train_step import TrainStep
from shardwright.weights.adapter_weights import beside, seeded_factors
from shardwright.weights.peft_layout import factor_shapes, from_peft, peft_keys
from shardwright.weights.weight_sources import Source, state_dict_weights
from shardwright.xla.device_mesh import build_mesh
from tests.support.cases import Case, make_batch, plain_model, reference_loss, small_config
from tests.support.jobs import job_of

Tensors = dict[str, torch.Tensor]
_SAVED = ("inference_mode", "peft_type")  # what a config of a saved adapter says beside


def in_a_file(name: str) -> str:
    """PEFT's name of a parameter as it is saved."""
    for inside, left in ((".modules_to_save", ""), (".default", ""), ("_vector.weight", "_vector")):
        name = name.replace(inside, left)
    return name


@dataclass
class Adapted:
    """Ours, and PEFT's model; both have the factors ``start``."""

    job: Job
    case: Case
    peft: PeftModel
    keys: dict[str, str]  # our name of a factor -> PEFT's
    shapes: dict[str, tuple[int, ...]]
    start: Tensors
    base: Tensors

    @property
    def theirs(self) -> dict[str, torch.nn.Parameter]:
        """PEFT's parameters that are trained, under the names that it saves them by."""
        return {in_a_file(n): p for n, p in self.peft.named_parameters() if p.requires_grad}

    def in_our_form(self, theirs: dict[str, Any]) -> Tensors:
        """Tensors under PEFT's names, in PEFT's shapes → ours."""
        return {name: from_peft(key, name, theirs[key], self.shapes[name]) for name, key in self.keys.items()}

    def reference_gradients(self, batch: Tensors) -> tuple[float, Tensors]:
        """PEFT's loss and gradients, with the dropout of our first step."""
        self.peft.zero_grad()
        count, total = self.case.step.accumulation, 0.0
        for number in range(count):
            rows = {name: t[number::count] for name, t in batch.items()}
            key = torch.tensor(random_bits.key_of(f"{self.case.step.seed}/1/{number}"), dtype=torch.int32)
            with randomness.drawing(key):
                loss = reference_loss(self.peft, rows, router_loss=self.case.recipe.compute.router_loss)
            share = (scored_tokens(rows["labels"]) / scored_tokens(batch["labels"])).item()
            (loss * share).backward()
            total += loss.item() * share
        return total, self.in_our_form({key: p.grad.clone() for key, p in self.theirs.items()})

    def clipped_reference_gradients(self, batch: Tensors) -> tuple[float, Tensors]:
        """PEFT's loss and gradients as `torch.nn.utils.clip_grad_norm_` leaves them at a limit of 1."""
        loss, _ = self.reference_gradients(batch)
        torch.nn.utils.clip_grad_norm_(self.theirs.values(), 1.0)
        return loss, self.in_our_form({key: p.grad.clone() for key, p in self.theirs.items()})

    def train_both(self, steps: int, learning_rate: float, taken: int = 0) -> None:
        """AdamW steps of ours, and as many of `torch.optim.AdamW` on PEFT's factors; of ours ``taken`` are taken."""
        decay = self.case.step.optimizer.weight_decay
        optimizer = torch.optim.AdamW(self.theirs.values(), lr=learning_rate, weight_decay=decay)
        for i in range(steps):
            batch = make_batch(self.case.config, seed=i)
            if i >= taken:
                self.case.step(batch, step=i + 1, learning_rate=learning_rate)
            optimizer.zero_grad()
            reference_loss(self.peft, batch, router_loss=self.case.recipe.compute.router_loss).backward()
            torch.nn.utils.clip_grad_norm_(self.theirs.values(), 1.0)
            optimizer.step()


def make_adapted(
    recipe_name: str,
    *,
    accumulation: int = 1,
    options: dict[str, Any] | None = None,
    changes: dict[str, Any] | None = None,
    **compute: Any,
) -> Adapted:
    """``options`` are those of TrainingArguments, ``changes`` those of the config; ``compute`` overrides the recipe's.
    No token is dropped.
    """
    recipe = load_recipe(recipe_name)
    config = small_config(recipe, **(changes or {}))
    plain = plain_model(config)
    routing = facts_of(config).routing
    if routing is not None:
        compute = {"capacity_factor": routing[1] / routing[0], **compute}
    recipe = recipe.computing(**compute)
    given = {"lora_r": 4, "lora_alpha": 6.0, "base_dtype": "float32", "weight_decay": 0.1} | (options or {})
    job = job_of(recipe, config, gradient_accumulation_steps=accumulation, **given)
    assert job.lora is not None
    if job.args.base_dtype in PACKINGS:
        round_as_stored(plain, job)
    base = {name: values.clone() for name, values in plain.state_dict().items()}
    number_layers(plain)
    said, lora = as_config(job.lora, job.model, None, {}), job.lora
    peft = get_peft_model(plain, LoraConfig(**{key: value for key, value in said.items() if key not in _SAVED}))
    keys, shapes = peft_keys(lora, job.model, {}), factor_shapes(lora, job.model)
    found = Adapted(job, None, peft, keys, shapes, {}, base)  # type: ignore[arg-type]
    assert found.theirs.keys() == set(keys.values())
    with torch.no_grad():
        for parameter in found.theirs.values():
            parameter.copy_((lora.dora and parameter.dim() == 1) * parameter + 0.1 * torch.randn_like(parameter))
    found.start = {n: t.contiguous().clone() for n, t in found.in_our_form(dict(found.theirs)).items()}
    found.start = {name: t.detach() for name, t in found.start.items()}
    mesh = build_mesh(recipe.mesh)
    weights = state_dict_weights(base)
    begun, given = seeded_factors(job.adapted, lora, 0, weights), state_dict_weights(found.start)
    factors: Source = lambda name: (begun if name.endswith((A0, B0)) else given)(name)  # noqa: E731
    placed = place_model(job, mesh, beside(weights, factors, lora.whole))
    step, evaluation = TrainStep(placed), evaluation_step(placed)
    found.case = Case(recipe, config, plain, job.stored, step, evaluation, mesh)
    found.case.model = placed.model  # type: ignore[attr-defined]
    return found


def round_as_stored(plain: torch.nn.Module, job: Job) -> None:
    """Rounds the weights of ``plain`` as ``job`` stores them: those that it packs as their packing does, all others to
    bfloat16.
    """
    packed = {entry.name: entry.packed for entry in job.plan.parameters if entry.packed is not None}
    assert packed
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            rounded = weight.bfloat16()
            if how := packed.get(name):
                rounded = how.packing.unpack(*how.packing.pack(weight, how.weight), how.weight, weight.dtype)
            weight.copy_(rounded)
