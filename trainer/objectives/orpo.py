"""ORPO (arXiv:2403.07691); its first term is, as in its authors' code, on the chosen answer's prompt too."""

from shardwright.objectives.objective import Tensor, torch
from shardwright.objectives.pairs import PairObjective, Pairs, log_sigmoid


class ORPO(PairObjective):
    """The chosen answer's tokens are learned, and its odds shall be higher than the rejected one's."""

    title = "ORPO"

    @property
    def chosen_weight(self) -> float:
        return 1.0

    def losses(self, pairs: Pairs) -> Tensor:
        chosen, rejected = pairs.answers
        return -self.numbers["beta"] * log_sigmoid(_log_odds(chosen) - _log_odds(rejected))


def _log_odds(logps: Tensor) -> Tensor:
    """log(p / (1 - p)) of log p, which is kept a rounding away from 0."""
    below = logps.clamp(max=-1e-7)
    return below - torch.log(-torch.expm1(below))
