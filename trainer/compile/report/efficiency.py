"""What part of a peak is reached, kind by kind: stated here with its source, and the user's to change.

Nothing here was measured by this project. A figure that was published for one generation is taken for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shardwright.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Efficiency:
    """A part of a peak, and where it is from.

    Args:
        of: the peak.
        source: who measured it, on what.
    """

    value: float
    of: str
    source: str


_AXLEARN = "github.com/apple/axlearn, commit c40b39a5: v5p, 2 sequences of 8,192, window 1,024, 110 heads of 128"
_JAX = "docs.jax.dev/en/latest/pallas/tpu/matmul.html: v5e, bfloat16"

EFFICIENCIES: dict[str, Efficiency] = {
    "compiler": Efficiency(
        1.0,
        "the speed that the compiler's cycles mean",
        f"{_JAX}: XLA's product of 8,192³ in 6.05 ms, for which the compiler's cycles are 6.37 ms (step_times.py)",
    ),
    "attention_forward": Efficiency(
        0.40, "peak FLOP/s", f"{_AXLEARN}: forward in 7.2 ms, which is 1.33e12 FLOPs in blocks of 512"
    ),
    "attention_backward": Efficiency(
        0.30, "peak FLOP/s", f"{_AXLEARN}: backward in 30.1 ms with one kernel, said to save up to 14 % over our two"
    ),
    "gmm": Efficiency(
        0.85, "peak FLOP/s", f"{_JAX}: Pallas in tiles of 512 × 1,024 × 1,024, 78.5 % at 4,096³, 91.5 at 8,192³"
    ),
    "tgmm": Efficiency(0.785, "peak FLOP/s", f"{_JAX}: the lower of the two, since tiles are half as wide here"),
    "hbm": Efficiency(1.0, "HBM bandwidth", "none found: the bandwidth of the chip's page"),
    "ici": Efficiency(1.0, "ICI bandwidth", "none found: the ring model of jax-ml.github.io/scaling-book/sharding"),
    "host": Efficiency(1.0, "PCIe bandwidth", "none found: v4's, of jax-ml.github.io/scaling-book/tpus, for all"),
    "dcn": Efficiency(1.0, "DCN bandwidth", "none found: the bandwidth of the chip's page"),
}


def efficiencies(text: str = "") -> dict[str, float]:
    """Kind → part of the peak that is reached: the stated ones, and those in ``text``, which win.

    Args:
        text: ``gmm=0.9,ici=0.8``.

    Raises:
        UserError: an unknown kind; a value that is no part of a whole.
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
        values[kind] = _part(word, number)
    return values


def _part(word: str, number: str) -> float:
    try:
        value = float(number)
    except ValueError:
        value = -1.0
    if not 0 < value <= 1:
        raise UserError(
            asked=f"--efficiency {word}",
            found=f"{number!r}" if number else "no value",
            why="it is the part of a peak that is reached",
            instead=f"a number above 0, at most 1: {word.partition('=')[0]}=0.8",
        )
    return value


def changed(values: Mapping[str, float]) -> dict[str, float]:
    """Those of ``values`` that differ from what is stated."""
    return {kind: value for kind, value in values.items() if value != EFFICIENCIES[kind].value}
