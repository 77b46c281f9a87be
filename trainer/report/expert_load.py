"""The load of a model's experts, as log entries and as a file."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# log keys; one layer's have its label behind a slash
BUSIEST, ENTROPY, DROPPED = "expert_load_max", "expert_load_entropy", "dropped_fraction"


@dataclass(frozen=True)
class ExpertLoad:
    """The load of one layer's experts over some steps."""

    name: str  # of the experts module
    shares: tuple[float, ...]  # of each expert in the (token, choice) pairs, without padding; they add up to 1
    dropped: float | None = None  # share of pairs without room at their expert; None: it has no capacity limit

    @property
    def over_mean(self) -> list[float]:
        return [share * len(self.shares) for share in self.shares]

    @property
    def entropy(self) -> float:
        """The entropy of the shares over that of equal ones: 1 is balanced, 0 is all on one expert."""
        nats = -sum(share * math.log(share) for share in self.shares if share > 0)
        return nats / math.log(len(self.shares)) if len(self.shares) > 1 else 1.0


def log_entries(loads: Sequence[ExpertLoad]) -> dict[str, float]:
    """The busiest expert's load over the mean, the entropy and the dropped share of each layer.

    For all layers, the highest load and the mean entropy; the step itself logs the dropped share of all.
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
    """Label such as ``layer_3`` → load; the module's name if that is ambiguous."""
    numbers = [re.search(r"(?<=\.)\d+(?=\.)", load.name) for load in loads]
    labels = [f"layer_{number[0]}" if number else load.name for number, load in zip(numbers, loads, strict=True)]
    clear = len(set(labels)) == len(labels)
    return {label if clear else load.name: load for label, load in zip(labels, loads, strict=True)}


def as_record(loads: Sequence[ExpertLoad], step: int) -> dict[str, Any]:
    layers = {load.name: {"shares": load.shares, "dropped": load.dropped} for load in loads}
    return {"step": step, "layers": layers}
