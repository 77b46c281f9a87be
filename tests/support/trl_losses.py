"""Loss formulae of trl's trainers, run from trl's own source on given log-probabilities.

A method is taken out of its file and run alone: the import of a trainer would take longer than all tests of a loss.
"""

from __future__ import annotations

import ast
import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

DPO = "trainer/dpo_trainer.py", "_compute_loss"
CPO = "experimental/cpo/cpo_trainer.py", "cpo_loss"


@cache
def method(file: str, name: str) -> tuple[Any, ast.AST]:
    """The function of the name in trl's file, and its syntax tree."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "trl: pip install -e '.[test]'"
    assert spec.submodule_search_locations
    tree = ast.parse((Path(spec.submodule_search_locations[0]) / file).read_text(encoding="utf-8"))
    (found,) = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name)
    found.returns, found.decorator_list = None, []
    for argument in found.args.args:
        argument.annotation = None
    names: dict[str, Any] = {"torch": torch, "F": F, "math": math}
    exec(compile(ast.Module([found], []), file, "exec"), names)
    return names[name], found


def loss_types() -> set[str]:
    """The loss types that trl's DPOTrainer compares its own with."""
    found = set()
    for node in ast.walk(method(*DPO)[1]):
        if isinstance(node, ast.Compare) and getattr(node.left, "id", "") == "loss_type":
            found |= {right.value for right in node.comparators if isinstance(right, ast.Constant)}
    return found


def dpo_loss(
    logps: torch.Tensor,
    scored: torch.Tensor,
    reference: torch.Tensor,
    kinds: Sequence[str],
    weights: Sequence[float] | None = None,
    *,
    beta: float,
    label_smoothing: float = 0.0,
    discopop_tau: float = 0.05,
    f_divergence_type: str = "reverse_kl",
    f_alpha_divergence_coef: float = 0.5,
) -> torch.Tensor:
    """DPOTrainer's loss of pairs.

    Args:
        logps: log-probabilities of the next tokens, of all chosen answers before all rejected ones. [2N, S]
        scored: the answers' tokens among them. [2N, S]
        reference: each answer's log-probability by the starting weights. [2N]
    """
    nothing = torch.zeros_like(logps)
    found = SimpleNamespace(log_probs=logps * scored, entropy=nothing, mean_logits=nothing, is_top1=nothing > 0)
    chosen, rejected = reference.chunk(2)
    mask = F.pad(scored.long(), (1, 0))  # of the tokens themselves
    inputs = {"input_ids": mask, "attention_mask": mask, "completion_mask": mask}
    itself = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=SimpleNamespace(device="cpu", gather=lambda x: x, gather_for_metrics=lambda x: x),
        args=SimpleNamespace(discopop_tau=discopop_tau),
        loss_types=kinds,
        loss_weights=weights or [1.0] * len(kinds),
        beta=beta,
        label_smoothing=label_smoothing,
        f_divergence_type=f_divergence_type,
        f_alpha_divergence_coef=f_alpha_divergence_coef,
        precompute_ref_logps=True,
        aux_loss_enabled=False,
        ld_alpha=None,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
    )
    given = {**inputs, "ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    loss: torch.Tensor = method(*DPO)[0](itself, lambda **_: found, given, False)
    return loss


def conservative_loss(ratios: torch.Tensor, beta: float, label_smoothing: float) -> torch.Tensor:
    """The smoothed `sigmoid` of CPOTrainer, of the ratios of all chosen answers before all rejected ones [2N]."""
    itself = SimpleNamespace(
        accelerator=SimpleNamespace(device="cpu"),
        alpha=0.0,
        loss_type="sigmoid",
        beta=beta,
        label_smoothing=label_smoothing,
    )
    losses: torch.Tensor = method(*CPO)[0](itself, *ratios.chunk(2))[0]
    return losses.mean()
