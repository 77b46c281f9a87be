"""Reference optimizers: torch's and transformers' own, and papers' programs in plain torch, for plain parameters."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.arguments.optimizer_options import OptimizerArguments
from shardwright.optimizers import OPTIMIZERS
from shardwright.prove.trajectory import Tensors

Groups = list[dict[str, Any]]  # torch's parameter groups, each with its weight decay


class Lion(torch.optim.Optimizer):
    """The update of program 1 in "Symbolic Discovery of Optimization Algorithms" (arXiv:2302.06675), in plain torch."""

    def __init__(self, groups: Groups, lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, decay, (beta1, beta2) = group["lr"], group["weight_decay"], group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * p.grad)
                p.sub_(rate * (direction + decay * p))
                momentum.copy_(beta2 * momentum + (1 - beta2) * p.grad)


class EachMatrix(torch.optim.Optimizer):
    """torch.optim.Muon, which takes matrices alone, over the matrices of parameters of experts."""

    def __init__(self, groups: Groups, lr: float, **options: Any) -> None:
        super().__init__(groups, {"lr": lr})
        self.matrices = {
            p: [nn.Parameter(m) for m in p.data.view(-1, *p.shape[-2:])] for g in groups for p in g["params"]
        }
        inner = [{**g, "params": [m for p in g["params"] for m in self.matrices[p]]} for g in self.param_groups]
        self.muon = torch.optim.Muon(inner, lr=lr, **options)

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for ours, theirs in zip(self.param_groups, self.muon.param_groups, strict=True):
            theirs["lr"] = ours["lr"]
        for p, matrices in self.matrices.items():
            gradients = [None] * len(matrices) if p.grad is None else p.grad.view(-1, *p.shape[-2:])
            for matrix, gradient in zip(matrices, gradients, strict=True):
                matrix.grad = gradient
        self.muon.step()
        for p, matrices in self.matrices.items():
            if p.grad is not None:
                kept = [self.muon.state[m]["momentum_buffer"] for m in matrices]
                self.state[p]["momentum_buffer"] = torch.stack(kept).view(p.shape)


@dataclass(frozen=True)
class Referee:
    """The reference of an entry of :mod:`shardwright.optimizers`.

    Attributes:
        title: its name in words.
        make: the optimizer from parameter groups, the entry with its numbers, and a learning rate.
        kept: its name of each tensor of a parameter's state → ours.
        by_shape: whether the update of a number depends on its parameter's shape.
    """

    title: str
    make: Callable[[Groups, Any, float], torch.optim.Optimizer]
    kept: Mapping[str, str]
    by_shape: bool = False


def _adafactor(groups: Groups, rule: Any, rate: float) -> torch.optim.Optimizer:
    from transformers.optimization import Adafactor

    numbers = {name: getattr(rule, name) for name in ("clip_threshold", "decay_rate", "scale_parameter")}
    return Adafactor(groups, lr=rate, relative_step=False, **numbers)  # type: ignore[no-untyped-call]


def _muon(groups: Groups, rule: Any, rate: float) -> torch.optim.Optimizer:
    numbers = {name: getattr(rule, name) for name in ("momentum", "ns_steps", "adjust_lr_fn")}
    return EachMatrix(groups, rate, **numbers)


REFEREES: dict[str, Referee] = {  # --optim → its reference
    "adamw": Referee(
        "torch's AdamW",
        lambda groups, rule, rate: torch.optim.AdamW(groups, lr=rate, betas=(rule.beta1, rule.beta2), eps=rule.epsilon),
        {"exp_avg": "first moment", "exp_avg_sq": "second moment"},
    ),
    "adafactor": Referee(
        "transformers' Adafactor",
        _adafactor,
        {
            "exp_avg_sq": "second moment",
            "exp_avg_sq_row": "second moment rows",
            "exp_avg_sq_col": "second moment columns",
        },
        by_shape=True,
    ),
    "lion": Referee(
        "the program of Lion's paper",
        lambda groups, rule, rate: Lion(groups, rate, (rule.beta1, rule.beta2)),
        {"momentum": "momentum"},
    ),
    "muon": Referee("torch's Muon", _muon, {"momentum_buffer": "momentum"}, by_shape=True),
}


class Reference:
    """The optimizers that ``args`` ask for, of ``named`` parameters, of which those ``decayed`` by name decay."""

    def __init__(
        self, named: Mapping[str, nn.Parameter], args: OptimizerArguments, decayed: Collection[str], rate: float
    ) -> None:
        entry, words = OPTIMIZERS[args.optim], {kind: word for word, kind in OPTIMIZERS.items()}
        taken = {name: p for name, p in named.items() if entry.takes(name, p.shape)}
        rest = {name: p for name, p in named.items() if name not in taken}
        self.parts: list[tuple[Referee, Mapping[str, nn.Parameter], torch.optim.Optimizer]] = []
        for kind, some in ((entry, taken), (entry.rest, rest)):
            groups = [
                {"params": [p for n, p in some.items() if (n in decayed) == decays], "weight_decay": amount}
                for decays, amount in ((True, args.weight_decay), (False, 0.0))
            ]
            if kind is not None and some:
                referee = REFEREES[words[kind]]
                made = referee.make([g for g in groups if g["params"]], args.rule(kind), rate)
                self.parts.append((referee, some, made))

    def step(self, learning_rate: float) -> None:
        for _, _, optimizer in self.parts:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
            optimizer.step()

    def state(self) -> dict[str, Tensors]:
        """Our name of a kind of state → parameter → its values."""
        found: dict[str, Tensors] = {}
        for referee, named, optimizer in self.parts:
            for name, parameter in named.items():
                for key, values in optimizer.state[parameter].items():
                    if key in referee.kept and isinstance(values, Tensor):
                        found.setdefault(referee.kept[key], {})[name] = values
        return found


@contextlib.contextmanager
def without_bfloat16() -> Iterator[None]:
    """Inside, Muon's iteration is in the precision of its gradients, on either side.

    In bfloat16, which torch's and ours compute it in, sums in another order have other roundings: there is no telling.
    """

    def as_it_is(tensor: Tensor) -> Tensor:
        return tensor

    own = torch.Tensor.bfloat16
    torch.Tensor.bfloat16 = as_it_is  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.Tensor.bfloat16 = own  # type: ignore[method-assign]
