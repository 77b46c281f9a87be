"""How tokens are spread over a model's experts: as log entries and as a file."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# log keys; behind a slash, of one layer
BUSIEST, ENTROPY, DROPPED = "expert_load_max", "expert_load_entropy", "dropped_fraction"


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer's experts over some steps.

    Args:
        name: the experts module's.
        shares: each expert's share of the (token, choice) pairs; they add up to 1. Padding is no token.
        dropped: the share of the pairs that their expert had no room for; None: it has no capacity.
    """

    name: str
    shares: tuple[float, ...]
    dropped: float | None = None

    @property
    def over_mean(self) -> list[float]:
        """Each expert's load over the mean load."""
        return [share * len(self.shares) for share in self.shares]

    @property
    def entropy(self) -> float:
        """The entropy of the shares over that of equal ones: 1 is balanced, 0 is all on one expert."""
        nats = -sum(share * math.log(share) for share in self.shares if share > 0)
        return nats / math.log(len(self.shares)) if len(self.shares) > 1 else 1.0


def log_entries(loads: Sequence[ExpertLoad]) -> dict[str, float]:
    """The busiest expert's load over the mean, the entropy, and what was dropped: of each layer, and of all.

    Of all: the layer where it is highest, and the mean of entropies. The step logs what is dropped in all.
    """
    if not loads:
        return {}
    entries = {BUSIEST: max(max(load.over_mean) for load in loads)}
    entries[ENTROPY] = sum(load.entropy for load in loads) / len(loads)
    for label, load in labelled(loads).items():
        entries[f"{BUSIEST}/{label}"] = max(load.over_mean)
        entries[f"{ENTROPY}/{label}"] = load.entropy
        if load.dropped is not None:
            entries[f"{DROPPED}/{label}"] = load.dropped
    return entries


def labelled(loads: Sequence[ExpertLoad]) -> dict[str, ExpertLoad]:
    """The loads by ``layer_3``; by the module's name where that is not clear."""
    numbers = [re.search(r"(?<=\.)\d+(?=\.)", load.name) for load in loads]
    labels = [f"layer_{number[0]}" if number else load.name for number, load in zip(numbers, loads, strict=True)]
    clear = len(set(labels)) == len(labels)
    return {label if clear else load.name: load for label, load in zip(labels, loads, strict=True)}


def as_record(loads: Sequence[ExpertLoad], step: int) -> dict[str, Any]:
    """The loads up to ``step``, JSON-able."""
    layers = {load.name: {"shares": load.shares, "dropped": load.dropped} for load in loads}
    return {"step": step, "layers": layers}
