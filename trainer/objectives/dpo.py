"""DPO (arXiv:2305.18290) and its variants, by the names of trl's ``loss_type``."""

import functools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import ClassVar

from shardwright.errors import UserError
from shardwright.objectives.dpo_losses import DIVERGENCES, LOSSES, SFT, Constants
from shardwright.objectives.objective import Batch, Choice, Number, Tensor, labels
from shardwright.objectives.pairs import BETA, PairObjective, Pairs

_TAU, _ALPHA = 0.05, 0.5
_CONSTANTS = [each.name for each in fields(Constants)]
_SMOOTHING = Number(
    0.0,
    "Of dpo, the share of pairs whose answers may be the other way round: conservative DPO with loss_type sigmoid, and "
    "the epsilon of robust, exo_pair, aot and aot_unpaired.",
    lambda value: 0 <= value < 0.5,
    "it is a share below one half",
)
OPTIONS: Mapping[str, Number | Choice] = {
    "beta": BETA,
    "loss_type": Choice(
        tuple(LOSSES),
        f"Of dpo, the loss of a pair: {', '.join(LOSSES)}; several with commas between them are added. "
        "Default: sigmoid.",
        several=True,
    ),
    "loss_weights": Choice((), "Of dpo, the weight of each --loss_type, with commas between them; 1 each.", True),
    "label_smoothing": _SMOOTHING,
    "discopop_tau": Number(_TAU, "Of loss_type discopop, its temperature.", lambda value: value > 0, "it is a scale"),
    "f_divergence_type": Choice(
        tuple(DIVERGENCES),
        f"Of dpo, the divergence from the starting weights: {', '.join(DIVERGENCES)}. Default: reverse_kl.",
    ),
    "f_alpha_divergence_coef": Number(
        _ALPHA, "The alpha of f_divergence_type alpha_divergence.", math.isfinite, "it is a number"
    ),
}


class DPO(PairObjective):
    """The chosen answer's likelihood shall grow more than the rejected one's, compared with the starting weights."""

    title = "DPO"
    reference = "reference"
    options: ClassVar[Mapping[str, Number | Choice]] = OPTIONS

    @property
    def mixture(self) -> tuple[tuple[str, float], ...]:
        """The loss types and their weights."""
        types, weights = self.words["loss_type"], self.words["loss_weights"]
        return tuple(zip(types, map(float, weights or ["1"] * len(types)), strict=True))

    @property
    def chosen_weight(self) -> float:
        return sum(weight for name, weight in self.mixture if name == SFT)

    @property
    def whole_batch(self) -> str:
        sorts = [name for name, _ in self.mixture if (found := LOSSES[name]) and found.sorts]
        return f"--loss_type {sorts[0]}" if sorts else ""

    def chosen_targets(self, batch: Batch) -> Tensor:
        """The answers' targets, for ``sft``."""
        return labels.targets(batch["labels"]) if self.chosen_weight else super().chosen_targets(batch)

    def score(self, ratios: Tensor) -> Tensor:
        (divergence,) = self.words["f_divergence_type"]
        return DIVERGENCES[divergence](ratios, self.numbers["f_alpha_divergence_coef"])

    def losses(self, pairs: Pairs) -> Tensor:
        constants = Constants(**{name: self.numbers[name] for name in _CONSTANTS})
        losses = [(found.loss(pairs, constants), weight) for name, weight in self.mixture if (found := LOSSES[name])]
        terms = [loss if weight == 1 else weight * loss for loss, weight in losses]
        return functools.reduce(operator.add, terms) if terms else 0 * pairs.real

    def check(self) -> None:
        given, known = self.words["loss_weights"], self.words["loss_type"]
        if given and not (len(given) == len(known) and all(map(_is_number, given))):
            raise UserError(
                asked=f"--loss_weights {','.join(given)}",
                found=f"--loss_type {','.join(known)}",
                why="each loss type has a weight, a number",
                instead=f"--loss_weights {','.join(['1'] * len(known))}, or none, which is the same",
            )
        if given and not any(map(float, given)):
            raise UserError(
                asked=f"--loss_weights {','.join(given)}",
                found="no weight above 0",
                why="the loss would be 0 whatever the model says, and nothing would be learned",
                instead="a weight other than 0, or none, which is 1 each",
            )
        smoothing = self.numbers["label_smoothing"]
        if "exo_pair" in known and not smoothing:
            raise UserError(
                asked="--loss_type exo_pair",
                found="--label_smoothing 0, the default",
                why="its loss has the logarithm of it",
                instead="--label_smoothing 0.001, as its authors have it",
            )
        found = [(name, loss) for name in known if (loss := LOSSES[name])]
        pairs = [name for name, loss in LOSSES.items() if loss]
        self._check_used("beta", BETA.default, bool(found), "loss_type", pairs)
        smoothed = [name for name, loss in LOSSES.items() if loss and loss.smooths]
        self._check_used("label_smoothing", 0.0, any(loss.smooths for _, loss in found), "loss_type", smoothed)
        self._check_used("discopop_tau", _TAU, "discopop" in known, "loss_type", ["discopop"])
        (divergence,) = self.words["f_divergence_type"]
        alpha = "alpha_divergence"
        self._check_used("f_alpha_divergence_coef", _ALPHA, divergence == alpha, "f_divergence_type", [alpha])
        other = [name for name, loss in found if not loss.diverges]
        if divergence != next(iter(DIVERGENCES)) and other:
            raise UserError(
                asked=f"--f_divergence_type {divergence} with --loss_type {other[0]}",
                found=f"{other[0]}, which takes the two answers one by one",
                why="an f-divergence leaves a term that cancels in the difference of two answers alone",
                instead="no --f_divergence_type, or a --loss_type of "
                + ", ".join(name for name, loss in LOSSES.items() if loss is None or loss.diverges),
            )

    def _check_used(self, name: str, default: float, used: bool, by: str, known: Sequence[str]) -> None:
        value = self.numbers[name]
        if value != default and not used:
            raise UserError(
                asked=f"--{name} {value}",
                found=f"--{by} {','.join(self.words[by])}",
                why="it has no part in that loss",
                instead=f"no --{name}, or a --{by} of {', '.join(known)}",
            )


def _is_number(word: str) -> bool:
    try:
        return math.isfinite(float(word))
    except ValueError:
        return False
