"""Adafactor, Lion and Muon: the plain model's weights under each one's reference, and a state that is saved and goes on.

AdamW's parity is in test_parity.py.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers.optimization import Adafactor

from tests.support.cases import Case, make_batch, make_case, reference_loss, relative
from trainer.arguments import TrainingArguments

DECAY, RATE, STEPS = 0.1, 3e-4, 10
OTHERS = ("adafactor", "lion", "muon")
Named = dict[str, torch.Tensor]


class Lion:
    """The update of program 1 in "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675), in plain torch."""

    def __init__(self, parameters: list[torch.Tensor], weight_decay: float, beta1: float = 0.9, beta2: float = 0.99):
        self.parameters, self.weight_decay, self.betas = parameters, weight_decay, (beta1, beta2)
        self.momentum = [torch.zeros_like(p) for p in parameters]

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        for p, m in zip(self.parameters, self.momentum, strict=True):
            assert p.grad is not None
            c = self.betas[0] * m + (1 - self.betas[0]) * p.grad
            p.sub_(learning_rate * (torch.sign(c) + self.weight_decay * p))
            m.copy_(self.betas[1] * m + (1 - self.betas[1]) * p.grad)


class Torch:
    """An optimizer of torch's kind, with the learning rate of each step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, learning_rate: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()


class EachMatrix:
    """torch.optim.Muon, which takes matrices alone, over the matrices of parameters of experts."""

    def __init__(self, parameters: list[torch.Tensor], **options: Any) -> None:
        self.parameters = parameters
        self.matrices = [
            [torch.nn.Parameter(m) for m in (p.data if p.dim() == 3 else p.data[None])] for p in parameters
        ]
        self.muon = Torch(torch.optim.Muon([m for each in self.matrices for m in each], **options))

    def step(self, learning_rate: float) -> None:
        for p, matrices in zip(self.parameters, self.matrices, strict=True):
            assert p.grad is not None
            for matrix, gradient in zip(matrices, p.grad if p.dim() == 3 else p.grad[None], strict=True):
                matrix.grad = gradient
        self.muon.step(learning_rate)


def references(optim: str, named: Named, numbers: dict[str, Any]) -> list[Any]:
    """The optimizers that train the plain model's parameters."""
    found: list[Any] = []
    for decay in (DECAY, 0.0):
        group = {name: p for name, p in named.items() if ("norm" not in name) == bool(decay)}
        if optim == "adafactor":
            form = {"lr": RATE, "relative_step": False, "scale_parameter": False, "weight_decay": decay}
            found.append(Torch(Adafactor(list(group.values()), **(form | numbers))))
        elif optim == "lion":
            found.append(Lion(list(group.values()), decay, **numbers))
        else:
            matrices = [p for name, p in group.items() if ".layers." in name and p.dim() > 1]
            rest = [p for p in group.values() if all(p is not other for other in matrices)]
            if matrices:
                form = {"weight_decay": decay, "adjust_lr_fn": "match_rms_adamw"}
                found.append(EachMatrix(matrices, **(form | numbers)))
            found.append(Torch(torch.optim.AdamW(rest, weight_decay=decay)))
    return found


def rate(step: int) -> float:
    return RATE * step / STEPS


def train(case: Case, optimizers: list[Any], steps: int) -> None:
    """``steps`` steps of ours, each at another learning rate, and of the references on the plain model."""
    for step in range(1, steps + 1):
        batch = make_batch(case.config, seed=step)
        case.step(batch, step=step, learning_rate=rate(step))
        case.reference.zero_grad()
        reference_loss(case.reference, batch, router_loss=case.recipe.compute.router_loss).backward()
        torch.nn.utils.clip_grad_norm_(case.reference.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step(rate(step))


@functools.cache
def trained(optim: str, recipe: str, optim_args: str | None, accumulation: int) -> Case:
    """A case after STEPS steps beside its reference."""
    more = {"optim": optim, "optim_args": optim_args}
    case = make_case(recipe, accumulation=accumulation, weight_decay=DECAY, more=more)
    numbers = TrainingArguments("any", **more).optimizer_numbers if optim_args else {}
    train(case, references(optim, dict(case.reference.named_parameters()), numbers), STEPS)
    return case


CASES = [
    ("adafactor", "llama_fsdp", "scale_parameter=true,clip_threshold=0.8", 2),
    ("adafactor", "mixtral_ep", None, 1),
    ("lion", "llama_fsdp", "beta1=0.8", 2),
    ("lion", "mixtral_ep", None, 1),
    ("muon", "llama_fsdp", "adjust_lr_fn=original,ns_steps=4", 2),
    ("muon", "mixtral_ep", None, 1),
]


@pytest.mark.parametrize(("optim", "recipe", "optim_args", "accumulation"), CASES)
def test_ten_steps_are_the_references_on_the_plain_model(optim, recipe, optim_args, accumulation):
    case = trained(optim, recipe, optim_args, accumulation)
    theirs = dict(case.reference.named_parameters())
    worst, name = relative(case.parameters(), theirs)
    print(optim, recipe, worst, name)
    assert case.step.compiles == 1
