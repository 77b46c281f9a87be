"""A step's estimated time, and the efficiencies that it assumes: parts of the chip's peaks, each with its source.

Nothing here was measured by this project. A figure published for one generation is taken for all of them; the user can
change each (``--efficiency``).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.compile.hlo.timeline import CAUSES
from shardwright.errors import UserError, did_you_mean
from shardwright.xla.chips import Chip


@dataclass(frozen=True)
class Efficiency:
    """The reached part ``value`` of the peak ``of``; ``source``: who measured it, on what."""

    value: float
    of: str
    source: str


_AXLEARN = "github.com/apple/axlearn, commit c40b39a5: v5p, 2 sequences of 8,192, window 1,024, 110 heads of 128"
_JAX = "docs.jax.dev/en/latest/pallas/tpu/matmul.html: v5e, bfloat16"

_CYCLES = f"{_JAX}: XLA's product of 8,192³ in 6.05 ms, for which the compiler's cycles are 6.37 ms (step_times.py)"
_FORWARD = f"{_AXLEARN}: forward in 7.2 ms, which is 1.33e12 FLOPs in blocks of 512"
_BACKWARD = f"{_AXLEARN}: backward in 30.1 ms with one kernel, said to save up to 14 % over our two"
_GMM = f"{_JAX}: Pallas in tiles of 512 × 1,024 × 1,024, 78.5 % at 4,096³, 91.5 at 8,192³"
EFFICIENCIES: dict[str, Efficiency] = {
    "compiler": Efficiency(1.0, "the speed that the compiler's cycles mean", _CYCLES),
    "attention_forward": Efficiency(0.40, "peak FLOP/s", _FORWARD),
    "attention_backward": Efficiency(0.30, "peak FLOP/s", _BACKWARD),
    "gmm": Efficiency(0.85, "peak FLOP/s", _GMM),
    "tgmm": Efficiency(0.785, "peak FLOP/s", f"{_JAX}: the lower of the two, since tiles are half as wide here"),
    "hbm": Efficiency(1.0, "HBM bandwidth", "none found: the bandwidth of the chip's page"),
    "ici": Efficiency(1.0, "ICI bandwidth", "none found: the ring model of jax-ml.github.io/scaling-book/sharding"),
    "host": Efficiency(1.0, "PCIe bandwidth", "none found: v4's, of jax-ml.github.io/scaling-book/tpus, for all"),
    "dcn": Efficiency(1.0, "DCN bandwidth", "none found: the bandwidth of the chip's page"),
}


def efficiencies(text: str = "") -> dict[str, float]:
    """Kind → reached part of the peak: :data:`EFFICIENCIES`, overridden by ``text``, ``gmm=0.9,ici=0.8``.

    Raises UserError for an unknown kind, and a value outside (0, 1].
    """
    values = {kind: each.value for kind, each in EFFICIENCIES.items()}
    for word in filter(None, text.replace(" ", "").split(",")):
        kind, _, number = word.partition("=")
        if kind not in values:
            raise UserError(
                asked=f"--efficiency {word}",
                found=f"no kind {kind!r}",
                why="an efficiency belongs to one of the kinds that the estimate tells apart",
                instead=did_you_mean(kind, values) + "one of: " + ", ".join(values),
            )
        try:
            values[kind] = float(number)
        except ValueError:
            values[kind] = math.nan
        if not 0 < values[kind] <= 1:
            raise UserError(
                asked=f"--efficiency {word}",
                found=f"{number!r}" if number else "no value",
                why="it is the part of a peak that is reached",
                instead=f"a number above 0, at most 1: {kind}=0.8",
            )
    return values


@dataclass(frozen=True)
class Estimate:
    """A step's estimated time."""

    seconds: float
    tokens_per_second: float | None  # of a chip, if the step's tokens are known
    mfu: float | None  # model FLOPs over the chip's peak in that time, if they are known
    shares: dict[str, float]  # cause → seconds, in the order of `hlo.timeline.CAUSES`
    efficiency: dict[str, float]  # those that the user changed


def estimate(
    seconds: Mapping[str, float],
    chip: Chip,
    tokens: float | None,
    model_flops: float | None,
    efficiency: Mapping[str, float],
) -> Estimate:
    """The estimate of a step from its seconds by cause; ``tokens`` and ``model_flops`` are a chip's."""
    total = sum(seconds.values())
    return Estimate(
        seconds=total,
        tokens_per_second=tokens / total if total > 0 and tokens is not None else None,
        mfu=model_flops / chip.flops / total if total > 0 and model_flops is not None else None,
        shares={cause: seconds.get(cause, 0.0) for cause in CAUSES},
        efficiency={kind: value for kind, value in efficiency.items() if value != EFFICIENCIES[kind].value},
    )
