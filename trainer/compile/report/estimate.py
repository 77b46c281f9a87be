"""A step's estimated time as a range with its middle, from the parts of the chip's peaks that it is taken to reach."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compile.hlo.efficiency import KINDS, MEASURED
from shardwright.compile.hlo.timeline import CAUSES
from shardwright.errors import UserError, did_you_mean
from shardwright.xla.chips import Chip

Ends = tuple[float, float]  # of a range, the lower first
# Seconds in which the host traces one layer that runs by itself, once a step: slow, middle, fast. docs/numbers.md,
# depth, on this project's machine of two cores: 30 ms a layer of 8 layers, 44 of 32; a TPU's host has faster ones.
TRACE_SECONDS = (0.044, 0.030, 0.015)


def given_efficiencies(text: str = "") -> dict[str, float]:
    """Kind → part of the peak, from ``gmm=0.9,ici=0.8``: one number in place of a range.

    Raises UserError for an unknown kind, and a value outside (0, 1], or beyond the highest that was measured.
    """
    values: dict[str, float] = {}
    for word in filter(None, text.replace(" ", "").split(",")):
        kind, _, number = word.partition("=")
        if kind not in KINDS:
            raise UserError(
                asked=f"--efficiency {word}",
                found=f"no kind {kind!r}",
                why="an efficiency belongs to one of the kinds that the estimate tells apart",
                instead=did_you_mean(kind, KINDS) + "one of: " + ", ".join(KINDS),
            )
        try:
            values[kind] = float(number)
        except ValueError:
            values[kind] = math.nan
        most = max(1.0, *(row.high for row in MEASURED if row.kind == kind))
        if not 0 < values[kind] <= most:
            raise UserError(
                asked=f"--efficiency {word}",
                found=f"{number!r}" if number else "no value",
                why="it is the part of a peak that is reached",
                instead=f"--efficiency {kind}=0.8, or another number above 0, at most {most:g}",
            )
    return values


@dataclass(frozen=True)
class Estimate:
    """A step's estimated time; 0 seconds: it was not compiled."""

    seconds: float  # the middle of the range
    tokens_per_second: float | None  # of a chip, if the step's tokens are known
    mfu: float | None  # model FLOPs over the chip's peak in that time, if they are known
    shares: dict[str, float]  # cause → seconds, in the order of `hlo.timeline.CAUSES`
    efficiency: dict[str, float]  # those that the user set
    fastest: float = 0.0  # seconds at the ends of the range
    slowest: float = 0.0

    def rates(self) -> Ends | None:
        """Tokens/s of a chip at the ends of the range, the lower first; None: the step's tokens are not known."""
        return self._ends(self.tokens_per_second)

    def mfus(self) -> Ends | None:
        """MFU at the ends of the range, the lower first; None: the model FLOPs are not known."""
        return self._ends(self.mfu)

    def _ends(self, middle: float | None) -> Ends | None:
        return None if middle is None else (middle * self.seconds / self.slowest, middle * self.seconds / self.fastest)


def ranged(middle: float, ends: Ends | None, form: str = ",.0f") -> str:
    """``7,059 (6,410 to 7,702)``; a middle alone if its range is not known."""
    return f"{middle:{form}}" + (f" ({ends[0]:{form}} to {ends[1]:{form}})" if ends else "")


def overlap(one: Ends, other: Ends) -> bool:
    """Whether two ranges (low, high) have a number in common."""
    return one[0] <= other[1] and other[0] <= one[1]


def estimate(
    seconds: Mapping[str, Mapping[str, float]],
    chip: Chip,
    tokens: float | None,
    model_flops: float | None,
    given: Mapping[str, float],
    traced_layers: int = 0,
) -> Estimate:
    """The estimate of a step from its seconds by cause, with all efficiencies ``low``, ``middle`` and ``high``.

    ``tokens`` and ``model_flops`` are a chip's, and ``traced_layers`` those that the host traces by themselves in each
    step, while the chip works. What causes miss of their middles is taken to be independent: the range is the root of
    the sum of their squares. Empty ``seconds``: the step was not compiled.
    """
    low, shares, high = (
        {cause: seconds.get(which, {}).get(cause, 0.0) for cause in CAUSES} for which in ("low", "middle", "high")
    )
    device = sum(shares.values())
    more, less = (math.hypot(*(end[cause] - shares[cause] for cause in CAUSES)) for end in (low, high))
    slow, middle, fast = (layer * traced_layers for layer in TRACE_SECONDS) if device else (0.0, 0.0, 0.0)
    shares["trace"] = max(middle - device, 0.0)
    total = sum(shares.values())
    return Estimate(
        seconds=total,
        tokens_per_second=tokens / total if total > 0 and tokens is not None else None,
        mfu=model_flops / chip.flops / total if total > 0 and model_flops is not None else None,
        shares=shares,
        efficiency=dict(given),
        fastest=max(device - less, fast),
        slowest=max(device + more, slow),
    )
