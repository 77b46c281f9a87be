"""IPO (arXiv:2310.12036): :class:`DPO` with the loss type ``ipo``."""

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.objectives.dpo import DPO
from shardwright.objectives.objective import Choice, Number
from shardwright.objectives.pairs import BETA


class IPO(DPO):
    """The margin of DPO, per token, shall be 1 / (2 tau), no more."""

    title = "IPO"
    options: ClassVar[Mapping[str, Number | Choice]] = {"beta": BETA}

    def __init__(self, values: Mapping[str, Any], length: int) -> None:
        dpo = DPO({**values, "loss_type": "ipo"}, length)
        self.numbers, self.words, self.length = dpo.numbers, dpo.words, length
