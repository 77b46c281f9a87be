"""SimPO (arXiv:2405.14734)."""

from typing import ClassVar

from shardwright.objectives.objective import Number, Tensor
from shardwright.objectives.pairs import BETA, PairObjective, Pairs, log_sigmoid


class SimPO(PairObjective):
    """The mean log-probability of the chosen answer's tokens shall be higher than the rejected one's, by a margin."""

    title = "SimPO"
    options: ClassVar = {
        "beta": BETA,
        "simpo_gamma": Number(
            0.5,
            "By how much simpo's reward of the chosen answer shall be the higher.",
            lambda value: value >= 0,
            "it is a margin",
        ),
    }

    def losses(self, pairs: Pairs) -> Tensor:
        return -log_sigmoid(self.numbers["beta"] * pairs.margin - self.numbers["simpo_gamma"])
