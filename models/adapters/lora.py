"""LoRA (arXiv:2106.09685): a frozen weight W acts as W + scale·B·A, with two small trained factors A and B.

The product B·A is never made: a token goes through A and then through B. A factor is a parameter of the module that
holds the weight, named like the weight with a suffix, so layers that repeat stack it like any other.

A linear layer may have more. Dropout stands before A. With DoRA (arXiv:2402.09353) each row of W + scale·B·A is scaled
to a trained length M. With a start from the weight itself (PiSSA, arXiv:2404.02948; OLoRA, arXiv:2406.01775) A and B
begin as A0 and B0, and W acts as W + scale·(B·A - B0·A0): frozen, A0 and B0 stand for the change of W that PEFT makes.

Rows of an embedding can be trained by themselves (PEFT's trainable tokens): frozen, it acts as if they were T. A head
that is tied to it has the same rows.

Shape suffixes: r rank, E experts. A is [r, in] or [E, r, in], B is [out, r] or [E, out, r], however the family
stores its weight, M is [out], and T is [rows, in].
"""

import functools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.models.swapped_methods import swap_methods

A, B, M, T = "_lora_A", "_lora_B", "_lora_M", "_lora_T"
A0, B0 = "_lora_A0", "_lora_B0"
# appended to a weight's name, the attribute of its module that holds the factor on the product: a tuple of one, since
# a number that differs between layers might become data
SCALE = "_lora_scale"
ROWS = "_lora_rows"  # … that holds the numbers of T's rows
_TRIED = 7  # rows, which no number of groups divides
_FACTOR = re.compile(r"(.+)_lora_(?:[AB]0?|M|T)")


@dataclass(frozen=True)
class Lora:
    """The weights that have factors, by their names in ``named_parameters``, and the factors' rank ``r``."""

    r: int
    alpha: float
    rslora: bool  # rank-stabilised (arXiv:2312.03732)
    targets: tuple[str, ...]
    ranks: tuple[tuple[str, int], ...] = ()  # targets whose rank is not `r`
    alphas: tuple[tuple[str, float], ...] = ()  # targets whose alpha is not `alpha`
    dropout: float = 0.0  # of A's input, in training
    dora: bool = False
    start: str = ""  # pissa or olora: the factors begin as parts of the weight
    whole: tuple[str, ...] = ()  # parameters beside the targets that are trained themselves
    tokens: tuple[
        tuple[str, tuple[int, ...]], ...
    ] = ()  # weights of embedding or head, and their rows that are trained

    def rank(self, target: str) -> int:
        return dict(self.ranks).get(target, self.r)

    def scale(self, target: str) -> float:
        """The factor on the product of the factors of ``target``."""
        alpha, r = dict(self.alphas).get(target, self.alpha), self.rank(target)
        return alpha / (math.sqrt(r) if self.rslora else r)

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of a target's parameters."""
        return (A, B, *((A0, B0) if self.start else ()), *((M,) if self.dora else ()))

    @property
    def unstarted(self) -> "Lora":
        """The same with A0 and B0 as ranks of A and B: twice the rank, beside the weight as it is."""
        if not self.start:
            return self
        more = math.sqrt(2) if self.rslora else 2  # so that the scale stays
        return replace(
            self,
            r=2 * self.r,
            alpha=more * self.alpha,
            ranks=tuple((name, 2 * r) for name, r in self.ranks),
            alphas=tuple((name, more * alpha) for name, alpha in self.alphas),
            start="",
        )


def base_of(name: str) -> str | None:
    """The name of the weight that the factor ``name`` belongs to, stacked or not; None if it is no factor."""
    found = _FACTOR.fullmatch(name)
    return found and found[1]


def own_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name → parameter that a run with ``model`` keeps: factors and what it trains beside them, or all without them."""
    named = dict(model.named_parameters())
    factors = {name for name in named if base_of(name) is not None}
    return {name: p for name, p in named.items() if name in factors or p.requires_grad} if factors else named


def adaptable(model: nn.Module, experts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Name → (rows, columns), as in [out, in], of each weight that can have factors; experts have E in front."""
    found: dict[str, tuple[int, ...]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and _is_linear(module):
            found[f"{name}.weight"] = tuple(module.weight.shape)
        elif name in experts:
            # transformers' `use_experts_implementation` sets this on every experts module
            turned = bool(module.is_transposed)
            for key, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 3 and key.endswith("_proj"):
                    count, rows, columns = parameter.shape
                    found[f"{name}.{key}"] = (count, columns, rows) if turned else (count, rows, columns)
    return found


def _is_linear(module: nn.Linear) -> bool:
    """Whether its forward takes rows to rows: some routers and products of groups are subclasses of another use."""
    if type(module).forward is nn.Linear.forward:
        return True
    try:
        own = {name: parameter.to("meta") for name, parameter in module.named_parameters()}
        rows = torch.empty(_TRIED, module.in_features, device="meta", dtype=module.weight.dtype)
        found = torch.func.functional_call(module, own, rows)
    except Exception:  # the class may do anything with its rows
        return False
    return isinstance(found, Tensor) and found.shape == (_TRIED, module.out_features)


def factor_shape(suffix: str, r: int, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of the factor with ``suffix`` of a weight of :func:`adaptable`'s ``shape``."""
    *experts, rows, columns = shape
    if suffix == M:
        return (rows,)
    return (*experts, *((r, columns) if suffix in (A, A0) else (rows, r)))


def attach(model: nn.Module, lora: Lora, shapes: dict[str, tuple[int, ...]]) -> None:
    """Add factors of :func:`adaptable`'s ``shapes`` to the targets in ``model``, on meta, in place; freeze all else."""
    model.requires_grad_(False)
    for name in lora.whole:
        model.get_parameter(name).requires_grad_(True)
    for name, rows in lora.tokens:
        _attach_rows(model, name, rows)
    for name in lora.targets:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        for suffix in lora.suffixes:
            empty = torch.empty(factor_shape(suffix, lora.rank(name), shapes[name]), device="meta")
            module.register_parameter(key + suffix, nn.Parameter(empty, requires_grad=suffix not in (A0, B0)))
        setattr(module, key + SCALE, (lora.scale(name),))
        if isinstance(module, nn.Linear):
            swap_methods(module, _LoraLinear, dropout=lora.dropout, dora=lora.dora, started=bool(lora.start))


def _attach_rows(model: nn.Module, name: str, rows: tuple[int, ...]) -> None:
    weight = model.get_parameter(name)
    own = nn.Parameter(torch.empty(len(rows), weight.shape[1], device="meta"))
    named = dict(model.named_parameters(remove_duplicate=False))
    for twin in [name, *(n for n, p in named.items() if p is weight and n != name)]:
        module: Any = model.get_submodule(twin.rpartition(".")[0])
        module.register_buffer("weight" + ROWS, torch.tensor(rows, dtype=torch.int32), persistent=False)
        if twin == name:
            module.register_parameter("weight" + T, own)
        module.rows_of = (model.get_submodule(name.rpartition(".")[0]),)  # a tuple: else it would be a part of this one
        original: Any = type(module)
        module.__class__ = _with_rows(original)


class _RowsEmbedding(nn.Embedding):
    def forward(self, ids: Tensor) -> Tensor:
        this: Any = self
        found, here = super().forward(ids), ids.unsqueeze(-1) == this.weight_lora_rows
        own = F.embedding(here.to(torch.int32).argmax(-1), this.weight_lora_T).to(found.dtype)
        return torch.where(here.any(-1, keepdim=True), own, found)


class _RowsHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        this: Any = self
        words = torch.arange(self.out_features, dtype=torch.int32, device=x.device)
        here = words == this.weight_lora_rows.unsqueeze(1)
        # spread by a product with ones and zeros: an index would scatter the logits' gradient
        own = F.linear(x, this.rows_of[0].weight_lora_T.to(x.dtype)) @ here.to(x.dtype)
        own = own if self.bias is None else own + self.bias
        return torch.where(here.any(0), own, super().forward(x))


@functools.cache
def _with_rows(original: type) -> type:
    """The class ``original`` of an embedding or a head with one of the forwards above inside its own."""
    own = _RowsEmbedding if issubclass(original, nn.Embedding) else _RowsHead
    return type(original.__name__, (own,) if own.__base__ is original else (original, own), {})


class _LoraLinear(nn.Module):
    """A linear layer with factors; the class attributes say what more than A and B it has."""

    dropout, dora, started = 0.0, False, False

    def forward(self, x: Tensor) -> Tensor:
        this: Any = self
        y, given = super().forward(x), x
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        added = self._product(x, A, B)
        if self.started:  # a part of the weight, so it is not dropped
            if x is given:
                added = added - self._product(x, A0, B0)  # together first: they begin equal
            else:
                y = y - self._product(given, A0, B0)
        if not self.dora:
            return y + added
        if x is given:
            base, rest = (y, 0.0) if this.bias is None else (y - this.bias, this.bias)
        else:  # as PEFT: what M changes of the weight's own product is seen through the dropout too
            base = F.linear(x, this.weight)
            base = base - self._product(x, A0, B0) if self.started else base
            rest = y - base
        return ((base + added) / _row_lengths(this)).to(y.dtype) * this.weight_lora_M + rest

    def _product(self, x: Tensor, first: str, second: str) -> Tensor:
        this: Any = self
        low = F.linear(x, getattr(this, "weight" + first))
        return F.linear(low, getattr(this, "weight" + second)) * this.weight_lora_scale[0]


@torch.no_grad()
def _row_lengths(module: Any) -> Tensor:
    """The float32 lengths, [out], of the rows of W + scale·B·A, a constant to the gradient as DoRA has it.

    The product is not made: |w + b·A|² = |w|² + 2·b·(A·w) + b·(A·Aᵀ)·b, for a row w of W and b of scale·B.
    """
    w, a, b = (t.detach().float() for t in (module.weight, module.weight_lora_A, module.weight_lora_B))
    if module.started:
        a, b = torch.cat([a, module.weight_lora_A0.float()]), torch.cat([b, -module.weight_lora_B0.float()], dim=1)
    b = b * module.weight_lora_scale[0]
    squares = w.square().sum(1) + (b * (2 * F.linear(w, a) + b @ F.linear(a, a))).sum(1)
    return squares.clamp(min=0.0).sqrt()
