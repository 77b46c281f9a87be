"""Observation of routers: the load of each expert, and losses beside those of the model's family.

Experts functions report where tokens went (:func:`count`); hooks observe routers (:func:`watch`). Both record small
sums in the layer, and leave the sum over devices to the reader: nothing crosses devices in a layer.

Shape suffixes: T tokens, k experts a token, E experts, R rows, S tokens of a row, G groups of tokens (one a batch
shard).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from shardwright.models.layers.side_outputs import real_tokens, record

# appended to an experts module's name to name its records
LOAD, DROPPED = " load", " dropped"
# names of every router's records, for the losses
_Z, _SHARE, _PICKED = "router z", "router share", "router picked"
# the attribute of an experts module that holds its `LoadRecord`
_COUNTED = "_shardwright_counted"

# a tensor whose dimension 0 the batch is split along -> the same in that layout
SplitRows = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LoadRecord:
    """The way an experts module's load is recorded; with one group a batch shard, counting needs no communication."""

    name: str = ""
    groups: int = 1
    split_rows: SplitRows = lambda tensor: tensor


@dataclass(frozen=True)
class RouterLosses:
    """Losses that are added to the model's own in training, each summed over layers."""

    # coefficient of the mean square of logsumexp over a token's logits (ST-MoE, arXiv:2202.08906, equation 5)
    z: float = 0.0
    # coefficient of E times the sum over experts of their share of choices × their mean normalised score (DeepSeek-V3,
    # arXiv:2412.19437, equations 17 to 20); choices are the k highest scores, without the selection bias
    balance: float = 0.0
    batch_wide: bool = False  # shares and means are the micro-batch's; else each row's, and the loss their mean

    @property
    def any(self) -> bool:
        return bool(self.z or self.balance)

    def values(self, recorded: Mapping[str, Sequence[Tensor]], real_RS: Tensor) -> dict[str, Tensor]:
        """Return ``z`` and ``balance``, without their coefficients, of the watched routers.

        ``recorded`` has tensors [R, …] by name, or [layers, R, …] of a stack; ``real_RS`` is 1 for a token, else 0.
        """
        zero = torch.zeros((), device=real_RS.device)
        z = sum((z_R.sum() for z_R in recorded.get(_Z, [])), zero) / real_RS.sum().clamp(min=1)
        rows = (real_RS.sum(1) > 0).to(torch.float32).sum().clamp(min=1)
        balance = zero
        for picked_RE, share_RE in zip(recorded.get(_PICKED, []), recorded.get(_SHARE, []), strict=True):
            if self.batch_wide:
                picked_RE, share_RE = (t.sum(-2, keepdim=True) for t in (picked_RE, share_RE))
            # a token's scores add up to 1, and its choices to k
            picked, share = (t / t.detach().sum(-1, keepdim=True).clamp(min=1) for t in (picked_RE, share_RE))
            each = picked.shape[-1] * (picked * share).sum(-1)
            balance = balance + each.sum() / (1 if self.batch_wide else rows)
        return {"z": z, "balance": balance}


def mark(model: nn.Module, names: Sequence[str], groups: int, split_rows: SplitRows) -> None:
    """Make the experts modules ``names`` of ``model`` record their load, each under its name. A copy keeps it."""
    for name in names:
        setattr(model.get_submodule(name), _COUNTED, LoadRecord(name, groups, split_rows))


def count(experts: Any, index_Tk: Tensor, dropped_Tk: Tensor | None = None) -> None:
    """Record the number of (token, choice) pairs for each expert, [G, E], and of dropped ones, [G], without padding."""
    how: LoadRecord = getattr(experts, _COUNTED, LoadRecord())
    chosen_TkE = index_Tk.unsqueeze(-1) == torch.arange(experts.num_experts, device=index_Tk.device)
    _record_groups(how, LOAD, chosen_TkE.to(torch.float32).sum(1))
    if dropped_Tk is not None:
        _record_groups(how, DROPPED, dropped_Tk.to(torch.float32).sum(1))


def _record_groups(how: LoadRecord, what: str, values_T: Tensor) -> None:
    """Record the sums of ``values_T`` [T, …] over each group."""
    real_RS = real_tokens()
    if real_RS is not None:
        values_T = values_T * real_RS.reshape(-1, *[1] * (values_T.dim() - 1))
    groups = how.groups if len(values_T) % how.groups == 0 else 1
    sums_G = values_T.unflatten(0, (groups, -1)).sum(1)
    record(how.name + what, how.split_rows(sums_G) if groups > 1 else sums_G)


def selection_biases(model: nn.Module, experts: Sequence[str]) -> dict[str, str]:
    """Map each bias that routers add to scores for selection only to the name of the experts that they choose for."""
    # It is known by its structure: beside or below the module that holds the experts, with one number an expert, saved,
    # and not trained by gradients (a buffer in most families, a frozen parameter in some). No module is stacked.
    saved = model.state_dict().keys()
    frozen = {name: t for name, t in model.named_parameters() if not t.requires_grad}
    vectors = {**{name: t for name, t in model.named_buffers() if name in saved}, **frozen}
    found = {}
    for name in experts:
        block = name.rpartition(".")[0] + "."
        count = len(next(iter(model.get_submodule(name).parameters())))
        for key, t in vectors.items():
            if key.startswith(block) and t.is_floating_point() and t.numel() == t.shape[-1:].numel() == count:
                found[key] = name
    return found


def routers(model: nn.Module) -> list[tuple[nn.Module, int]]:
    """Each router of ``model``, and the index of its logits among its outputs, by transformers' output collector."""
    found: dict[int, tuple[nn.Module, int]] = {}
    for part in model.modules():
        # semi-private: transformers/modeling_utils.py, transformers 5.23
        known: Any = getattr(part, "_can_record_outputs", None) if isinstance(part, PreTrainedModel) else None
        specs = (known or {}).get("router_logits") or []
        for spec in specs if isinstance(specs, list) else [specs]:
            kind: Any = getattr(spec, "target_class", spec)
            where = getattr(spec, "layer_name", None)
            for name, module in part.named_modules():
                if isinstance(module, kind) and (where is None or f".{where.strip('.')}." in f".{name}."):
                    found[id(module)] = module, getattr(spec, "index", 1)
    return list(found.values())


def watch(model: nn.Module, split_rows: SplitRows) -> None:
    """Make the routers of ``model`` record, in training, the values that :class:`RouterLosses` needs."""
    for router, index in routers(model):
        router.forward = functools.partial(_watched, router, router.forward, index, split_rows)


def _watched(
    router: nn.Module, forward: Callable[..., Any], index: int, split_rows: SplitRows, *args: Any, **kwargs: Any
) -> Any:
    with _Scoring() as scoring:
        output = forward(*args, **kwargs)
    real_RS = real_tokens()
    if not router.training or real_RS is None:
        return output
    values, index = (output, index) if isinstance(output, tuple) else ((output,), 0)
    R, S = real_RS.shape
    logits = scoring.before(values[index]).to(torch.float32)
    logits_TE = logits.reshape(R * S, -1)
    scores_TE = scoring.scores(logits).reshape(R * S, -1)
    scores_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
    chosen = next(v for v in values if isinstance(v, Tensor) and not v.is_floating_point())
    index_Tk = scores_TE.detach().topk(chosen.shape[-1], dim=-1).indices
    picked_TE = (index_Tk.unsqueeze(-1) == torch.arange(scores_TE.shape[-1], device=index_Tk.device)).sum(1)
    real_RS1 = real_RS.unsqueeze(-1)
    z_T1 = logits_TE.logsumexp(-1, keepdim=True).square()
    for name, values_T in ((_Z, z_T1), (_SHARE, scores_TE), (_PICKED, picked_TE.to(torch.float32))):
        record(name, split_rows((values_T.reshape(R, S, -1) * real_RS1).sum(1)))
    return output


class _Scoring(TorchFunctionMode):
    """Records, while a router runs, how it makes scores of its logits."""

    def __init__(self) -> None:
        super().__init__()
        self._function: Callable[[Tensor], Tensor] | None = None
        self._made: list[tuple[Tensor, Tensor]] = []
        self._gathered: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _SCORES:
            self._function = self._function or _SCORES[func]
            self._made.append((args[0], result))
        elif func in (torch.gather, Tensor.gather):
            self._gathered = args[0]
        return result

    def before(self, recorded: Tensor) -> Tensor:
        """Return the logits: ``recorded`` itself, or if those are scores, the tensor that they were made from."""
        return next((given for given, made in self._made if made is recorded), recorded)

    def scores(self, logits: Tensor) -> Tensor:
        """Return the router's scores of ``logits``, without the selection bias."""
        if self._function is None and self._gathered is not None and self._gathered.shape == logits.shape:
            return self._gathered.to(torch.float32)  # the router's own scoring function
        return (self._function or _softmax)(logits)


_softmax = functools.partial(torch.softmax, dim=-1)
_SCORES: dict[Any, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys((torch.softmax, Tensor.softmax, F.softmax), _softmax),
    **dict.fromkeys((torch.sigmoid, Tensor.sigmoid, F.sigmoid, F.logsigmoid), torch.sigmoid),
}


def weights_of_all(index_Tk: Tensor, weight_Tk: Tensor, E: int) -> Tensor:
    """The weight that each token gives to each of E experts, [T, E]: 0 for one that it does not choose."""
    chosen_TkE = (index_Tk.unsqueeze(-1) == torch.arange(E, device=index_Tk.device)).to(weight_Tk.dtype)
    return (weight_Tk.unsqueeze(-1) * chosen_TkE).sum(1)
