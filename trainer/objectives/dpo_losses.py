"""Losses of DPO's family by the names of trl's ``loss_type``: pure functions of both answers' log-probabilities.

All that trl 1.16's `DPOTrainer` has, with its formulae. Each maps the pairs of a batch to the loss of each pair [B, P].

Shape legend: B rows, P pairs in a row at most.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shardwright.objectives.objective import Tensor, torch
from shardwright.objectives.pairs import Pairs, halves, log_sigmoid


@dataclass(frozen=True)
class Constants:
    """The numbers of a loss, by the names of their options."""

    beta: float
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05


@dataclass(frozen=True)
class PairLoss:
    """A loss type.

    Args:
        smooths: it has a place for ``label_smoothing``.
        diverges: it is made of the margin of two scores alone, in which the term that an f-divergence leaves cancels.
        sorts: a pair's loss depends on the other pairs of its batch.
    """

    loss: Callable[[Pairs, Constants], Tensor]
    smooths: bool = False
    diverges: bool = False
    sorts: bool = False


def _sigmoid(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2305.18290; with smoothing conservative DPO, which its authors derive from labels that may be wrong."""
    return _smoothed(constants.beta * pairs.margin, constants.label_smoothing)


def _sigmoid_norm(pairs: Pairs, constants: Constants) -> Tensor:
    return -log_sigmoid(constants.beta * pairs.margin_a_token)


def _hinge(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2305.10425 (SLiC), of DPO's margin."""
    return (1 - constants.beta * pairs.margin).relu()


def _ipo(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2310.12036, per token, as its authors run it."""
    return (pairs.margin_a_token - 1 / (2 * constants.beta)).square()


def _exo_pair(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2402.00856, equation 16."""
    x, smoothing = constants.beta * pairs.margin, constants.label_smoothing
    better = x.sigmoid() * (log_sigmoid(x) - math.log1p(-smoothing))
    return better + (-x).sigmoid() * (log_sigmoid(-x) - math.log(smoothing))


def _nca_pair(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2402.05369."""
    chosen, rejected = (constants.beta * ratios for ratios in pairs.answers)
    return -log_sigmoid(chosen) - 0.5 * log_sigmoid(-chosen) - 0.5 * log_sigmoid(-rejected)


def _robust(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2403.00409: unbiased where a share of the labels, the smoothing, is wrong."""
    x, smoothing = constants.beta * pairs.margin, constants.label_smoothing
    return (smoothing * log_sigmoid(-x) - (1 - smoothing) * log_sigmoid(x)) / (1 - 2 * smoothing)


def _bco_pair(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2404.04656, without the mean reward that its authors shift by, as trl has it for pairs."""
    chosen, rejected = pairs.answers
    return -log_sigmoid(constants.beta * chosen) - log_sigmoid(-constants.beta * rejected)


def _sppo_hard(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2405.00675, where the chosen answer always wins."""
    chosen, rejected = pairs.answers
    return (chosen - 0.5 / constants.beta).square() + (rejected + 0.5 / constants.beta).square()


def _aot(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2406.05882: the distribution of margins shall lie above that of the starting weights."""
    own, reference = halves(pairs.logps), halves(pairs.logps_before)
    delta = _sorted(own[0] - own[1], pairs.real) - _sorted(reference[0] - reference[1], pairs.real)
    return _smoothed(constants.beta * delta, constants.label_smoothing)


def _aot_unpaired(pairs: Pairs, constants: Constants) -> Tensor:
    chosen, rejected = (_sorted(ratios, pairs.real) for ratios in pairs.answers)
    return _smoothed(constants.beta * (chosen - rejected), constants.label_smoothing)


def _apo_zero(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2408.06266, equation 7: for chosen answers that are better than the model's."""
    chosen, rejected = pairs.answers
    return 1 - (constants.beta * chosen).sigmoid() + (constants.beta * rejected).sigmoid()


def _apo_down(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2408.06266, equation 8: for chosen answers that are worse than the model's."""
    chosen, rejected = pairs.answers
    return (constants.beta * chosen).sigmoid() + 1 - (constants.beta * (chosen - rejected)).sigmoid()


def _discopop(pairs: Pairs, constants: Constants) -> Tensor:
    """arXiv:2406.08414, equation 5."""
    x = constants.beta * pairs.margin
    share = (x / constants.discopop_tau).sigmoid()
    return -log_sigmoid(x) * (1 - share) + (-x).exp() * share


def _smoothed(x: Tensor, smoothing: float) -> Tensor:
    """-log σ(x), with the weight ``smoothing`` on the other order of the answers."""
    return -log_sigmoid(x) * (1 - smoothing) - log_sigmoid(-x) * smoothing if smoothing else -log_sigmoid(x)


def _sorted(values: Tensor, real: Tensor) -> Tensor:
    """``values`` of ``real`` pairs in ascending order, in the places of real pairs. [B, P]"""
    last = torch.where(real > 0, values, 1e30).flatten().sort().values  # the others behind them
    rank = (real.flatten().cumsum(0) - 1).clamp(min=0).to(torch.int64)
    return last[rank].view(values.shape)


SFT = "sft"  # the mean cross entropy of the chosen answers' tokens, which is no loss of pairs
LOSSES: dict[str, PairLoss | None] = {
    "sigmoid": PairLoss(_sigmoid, smooths=True, diverges=True),
    "hinge": PairLoss(_hinge, diverges=True),
    "ipo": PairLoss(_ipo, diverges=True),
    "exo_pair": PairLoss(_exo_pair, smooths=True, diverges=True),
    "nca_pair": PairLoss(_nca_pair),
    "robust": PairLoss(_robust, smooths=True, diverges=True),
    "bco_pair": PairLoss(_bco_pair),
    "sppo_hard": PairLoss(_sppo_hard),
    "aot": PairLoss(_aot, smooths=True, sorts=True),
    "aot_unpaired": PairLoss(_aot_unpaired, smooths=True, sorts=True),
    "apo_zero": PairLoss(_apo_zero),
    "apo_down": PairLoss(_apo_down),
    "discopop": PairLoss(_discopop, diverges=True),
    SFT: None,
    "sigmoid_norm": PairLoss(_sigmoid_norm, diverges=True),
}


def _alpha(ratios: Tensor, alpha: float) -> Tensor:
    if abs(alpha - 1) < 1e-6:  # there it is the logarithm
        return ratios
    return (((alpha - 1) * ratios).clamp(max=80.0).exp() - 1) / (alpha - 1)


# --f_divergence_type (arXiv:2309.16240) → an answer's score from log π/π₀ and alpha: f' of π/π₀
DIVERGENCES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda ratios, _: ratios,
    "forward_kl": lambda ratios, _: 1 - (-ratios).exp(),
    "js_divergence": lambda ratios, _: math.log(2) + log_sigmoid(ratios),
    "alpha_divergence": _alpha,
}
