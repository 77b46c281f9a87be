"""IPO (arXiv:2310.12036), per token, as its authors run it."""

from shardwright.objectives.objective import Tensor
from shardwright.objectives.pairs import PairObjective


class IPO(PairObjective):
    """The margin of DPO, per token, shall be 1 / (2 tau), no more."""

    title = "IPO"
    reference = "reference"
    per_token = True

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return (chosen - rejected - 1 / (2 * self.numbers["beta"])).square()
