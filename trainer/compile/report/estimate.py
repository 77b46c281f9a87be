"""One number for a step: the seconds that it is estimated to take, and what they go to. Nothing ran."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compile.hlo.timeline import CAUSES
from shardwright.compile.report.efficiency import changed
from shardwright.xla.chips import Chip


@dataclass(frozen=True)
class Estimate:
    """A step's estimated time.

    Args:
        seconds: of one step; the sum of ``shares``.
        tokens_per_second: of one chip; None if it is not known how many tokens a step takes.
        mfu: model FLOPs over the chip's peak in that time; None without model FLOPs.
        shares: cause → seconds, in the order of :data:`shardwright.compile.hlo.timeline.CAUSES`.
        efficiency: the efficiencies that are not the stated ones.
    """

    seconds: float
    tokens_per_second: float | None
    mfu: float | None
    shares: dict[str, float]
    efficiency: dict[str, float]


def estimate(
    seconds: Mapping[str, float],
    chip: Chip,
    tokens: float | None,
    model_flops: float | None,
    efficiency: Mapping[str, float],
) -> Estimate:
    """The estimate of a step.

    Args:
        seconds: by cause.
        tokens, model_flops: a chip's part of a step's.
    """
    total = sum(seconds.values())
    known = total > 0
    return Estimate(
        seconds=total,
        tokens_per_second=tokens / total if known and tokens is not None else None,
        mfu=model_flops / chip.flops / total if known and model_flops is not None else None,
        shares={cause: seconds.get(cause, 0.0) for cause in CAUSES},
        efficiency=changed(efficiency),
    )
