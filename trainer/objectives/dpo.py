"""DPO (arXiv:2305.18290)."""

from shardwright.objectives.objective import Tensor
from shardwright.objectives.pairs import PairObjective, log_sigmoid


class DPO(PairObjective):
    """The chosen answer's likelihood shall grow more than the rejected one's, compared with the starting weights."""

    title = "DPO"
    reference = "reference"

    def losses(self, chosen: Tensor, rejected: Tensor) -> Tensor:
        return -log_sigmoid(self.numbers["beta"] * (chosen - rejected))
