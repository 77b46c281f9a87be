"""The plain side of a proof: transformers' own model, eager, whole, dropless, under a reference optimizer.

LoRA is PEFT's.
"""

import contextlib
import copy
import functools
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.trainer_pt_utils import get_parameter_names

from shardwright.job import Job
from shardwright.model.meta_model import scores_texts
from shardwright.model.peft_config import as_config
from shardwright.models.adapters.lora import A0, B0, Lora
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.layers.decoder_layers import number_layers
from shardwright.models.ops import random_bits, randomness
from shardwright.models.ops.labels import scored_tokens
from shardwright.prove.batches import Batch, apart
from shardwright.prove.formulas import FORMULAS, Said, mismatched
from shardwright.prove.reference_optimizers import REFEREES, Reference
from shardwright.prove.small_job import unproved
from shardwright.prove.trajectory import Tensors, Trajectory
from shardwright.step.parameter_updates import NO_DECAY
from shardwright.weights.adapter_weights import beside, seeded_factors
from shardwright.weights.peft_layout import factor_shapes, from_peft, peft_keys
from shardwright.weights.weight_sources import Source, state_dict_weights

_SAVED = ("inference_mode", "peft_type")  # what a config of a saved adapter says beside


@dataclass
class PlainModel:
    """The reference of a job; every run of it begins at the same weights.

    Attributes:
        model: float32, never trained itself.
        base: the values of transformers' model, under its own names.
        factors: LoRA's first values, under ours; empty without.
        keys: our name of a trained parameter → the reference's.
    """

    job: Job
    model: nn.Module
    base: Tensors
    factors: Tensors = field(default_factory=dict)
    keys: Mapping[str, str] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def source(self) -> Source:
        """The weights that our side begins with."""
        weights, lora = state_dict_weights({k: v.clone() for k, v in self.base.items()}), self.job.lora
        if lora is None:
            return weights
        begun, given = seeded_factors(self.job.adapted, lora, 0, weights), state_dict_weights(self.factors)
        return beside(weights, lambda name: (begun if name.endswith((A0, B0)) else given)(name), lora.whole)

    def loss(self, model: nn.Module, batch: Batch, step: int) -> Tensor:
        """The loss of a step: the mean over micro-batches, each divided by its share of the step's scored tokens."""
        count, total = self.job.args.gradient_accumulation_steps, torch.zeros(())
        tokens = None if count == 1 else scored_tokens(batch["labels"]) / count
        for number in range(count):
            rows = {name: values[number::count] for name, values in batch.items()}
            key = torch.tensor(random_bits.key_of(f"{self.job.args.seed}/{step}/{number}"), dtype=torch.int32)
            with randomness.drawing(key):
                total = total + self._micro_batch(model, rows, tokens) / count
        return total

    def _micro_batch(self, model: nn.Module, batch: Batch, tokens: Tensor | None) -> Tensor:
        args, goal, router = self.job.args, self.job.args.goal, self.job.router_loss
        rows = apart(batch) if "segment_ids" in batch else batch
        inputs: dict[str, Any] = {name: rows[name] for name in ("input_ids", "attention_mask") if name in rows}
        more: dict[str, Any] = {"use_cache": False}
        if hasattr(self.job.config, "output_router_logits"):
            more["output_router_logits"] = router
            inputs.setdefault("attention_mask", torch.ones_like(rows["input_ids"]))
        if not goal.parts and not any(goal.token_terms):
            counted = {} if tokens is None else {"num_items_in_batch": tokens}
            return model(**inputs, **more, **counted, labels=rows["labels"]).loss
        output = model(**inputs, **more)
        loss = FORMULAS[args.objective](Said(output.logits, rows, goal, tokens))
        if not router:
            return loss
        if "segment" in rows and (others := mismatched(rows, goal)).any():
            output = model(**{name: values[~others] for name, values in inputs.items()}, **more)
        return loss + self.job.config.router_aux_loss_coef * output.aux_loss

    def run(self, batches: list[Batch], learning_rate: float, dtype: torch.dtype = torch.float32) -> Trajectory:
        """One step a batch. In bfloat16 parameters are rounded at the start: run but one step."""
        model = _in(copy.deepcopy(self.model).train(), dtype)
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        start = {name: p.detach().clone() for name, p in trained.items()}
        decayed = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))  # transformers' own rule
        optimizer = Reference(trained, self.job.args, decayed, learning_rate)
        found = Trajectory()
        with default_dtype(dtype if dtype == torch.float64 else torch.float32):
            for step, batch in enumerate(batches, 1):
                model.zero_grad()
                loss = self.loss(model, batch, step)
                loss.backward()
                gradients = {name: p.grad for name, p in trained.items() if p.grad is not None}
                if step == 1:
                    found.gradients = self._ours({k: g.detach().clone() for k, g in gradients.items()})
                found.losses.append(loss.item())
                limit = self.job.args.max_grad_norm
                norm = torch.nn.utils.clip_grad_norm_(trained.values(), limit if limit > 0 else torch.inf)
                found.norms.append(norm.item())
                optimizer.step(learning_rate)
        changes = {name: p.detach() - start[name] for name, p in trained.items() if p.grad is not None}
        found.changes = self._ours(changes)
        found.state = {kind: self._ours(tensors) for kind, tensors in optimizer.state().items()}
        return found

    def _ours(self, tensors: Tensors) -> Tensors:
        """Tensors under the reference's names and shapes → under ours."""
        if not self.keys:
            return tensors
        saved = {_in_a_file(name): values for name, values in tensors.items()}
        return {n: from_peft(key, n, saved[key], self.shapes[n]) for n, key in self.keys.items() if key in saved}


def plain_model(job: Job) -> PlainModel:
    """The reference of ``job``, with seeded weights. UserError: transformers or PEFT can't make it."""
    model = eager_model(job.config)
    randomise(model)
    number_layers(model)
    base = {name: values.clone() for name, values in model.state_dict().items()}
    if job.lora is None:
        return PlainModel(job, model, base)
    peft, keys, shapes = _adapted(job, job.lora, model)
    optim = job.args.optim
    named = {_in_a_file(n): p.detach() for n, p in peft.named_parameters() if p.requires_grad}
    if REFEREES[optim].by_shape and (odd := [n for n, key in keys.items() if named[key].shape != shapes[n]]):
        raise unproved(
            f"--optim {optim} with --lora_r on experts",
            f"PEFT keeps the factor {odd[0]} in another shape",
            "on its shape the update of each number depends",
            "--optim adamw, which proves all but the update",
        )
    factors = {n: from_peft(key, n, named[key], shapes[n]).contiguous().clone() for n, key in keys.items()}
    return PlainModel(job, peft, base, factors, keys, shapes)


def eager_model(config: PretrainedConfig) -> PreTrainedModel:
    torch.manual_seed(0)
    kind = AutoModelForSequenceClassification if scores_texts(config) else AutoModelForCausalLM
    model: PreTrainedModel = kind.from_config(config, dtype=torch.float32)
    if scores_texts(config):
        model.config.pad_token_id = 0  # a score is read in front of it: `apart` pads with it, and no text has it
    model.set_attn_implementation("eager")
    if experts_modules(model):  # others know one way to run them
        model.set_experts_implementation("eager")
    return model


@torch.no_grad()
def randomise(model: PreTrainedModel) -> None:
    """Random weights: matrices scaled by fan-in, so that every layer counts; all others moved off their first value.

    Behind a short convolution a norm divides what is often near zero, and rounding grows from step to step until the
    plain model leaves its own float64. So convolutions are small, as far as that norm's epsilon, and embeddings of size
    one, beside which a layer adds little.
    """
    saved = model.state_dict().keys()
    convolved = {f"{name}.weight" for name, module in model.named_modules() if isinstance(module, nn.Conv1d)}
    tied = getattr(model.config, "tie_word_embeddings", False)  # some families' configs have no such entry
    embedded = model.get_input_embeddings().weight if convolved and not tied else None
    for name, parameter in model.named_parameters():
        noise = torch.randn_like(parameter)
        if name.endswith("A_log"):  # a state that lasts: most families' initial one is gone after a token
            parameter.copy_(noise / 2 - 1)
        elif parameter.dim() > 1 and (not parameter.any() or parameter.mean().abs() < parameter.std()):
            size = 1.0 if parameter is embedded else parameter.shape[-1] ** -0.5
            parameter.copy_(noise * (size / 10 if name in convolved else size))
        else:
            parameter.add_(noise / 10)
    for name, buffer in model.named_buffers():
        # buffers of more dimensions are computed from others, such as the decays of linear attention
        if name in saved and buffer.is_floating_point() and buffer.dim() < 2:
            buffer.add_(torch.randn_like(buffer) / 10)
    model.tie_weights()


def _adapted(job: Job, lora: Lora, plain: PreTrainedModel) -> tuple[nn.Module, dict[str, str], Any]:
    """PEFT's model around ``plain``, with factors of which none is zero; our names → PEFT's; and our shapes."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise unproved(
            "--lora_r", "the package peft is not installed", "its factors are the reference", "pip install peft==0.21.2"
        ) from error
    said = as_config(lora, job.model, None, {})
    config = LoraConfig(**{key: value for key, value in said.items() if key not in _SAVED})
    with warnings.catch_warnings(action="ignore"):  # of names that it looks for elsewhere, and of transformers' own
        peft = get_peft_model(plain, config)
    with torch.no_grad():
        for parameter in (p for p in peft.parameters() if p.requires_grad):
            parameter.copy_((lora.dora and parameter.dim() == 1) * parameter + 0.1 * torch.randn_like(parameter))
    return peft, peft_keys(lora, job.model, {}), factor_shapes(lora, job.model)


def _in_a_file(name: str) -> str:
    """PEFT's name of a parameter as it is saved."""
    replaced = ((".modules_to_save", ""), (".default", ""), ("_vector.weight", "_vector"))
    return functools.reduce(lambda text, pair: text.replace(*pair), replaced, name)


def _in(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """``model`` in ``dtype``; in bfloat16 its parameters alone, as transformers loads one."""
    if dtype != torch.bfloat16:
        return model.to(dtype)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """For tensors that a model makes, such as the scalar that it masks with."""
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)
