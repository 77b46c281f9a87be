"""Parts of a chip's peaks that a step is taken to reach: ranges from published measurements, a table of data.

Nothing here was measured by this project. A part is looked up by the kind of work, the chip and a size; between two
sizes it is interpolated over the size's logarithm, beyond them it stays. A chip without a row takes those of any chip.
The user can set each kind to one number (``--efficiency``).
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Which = Literal["low", "middle", "high"]

# kind → (peak of which it is a part, what a row's size is)
KINDS = {
    "compiler": ("speed that the compiler's cycles of matrix products mean", ""),
    "attention_forward": ("peak FLOP/s of the matrix units that its heads fill", "tokens of a row"),
    "attention_backward": ("peak FLOP/s of the matrix units that its heads fill", "tokens of a row"),
    "gmm": ("peak FLOP/s, of all rows in the tiles that are visited", "rows of a tile"),
    "tgmm": ("peak FLOP/s, of all rows in the tiles that are visited", "rows of a tile"),
    "hbm": ("HBM bandwidth", ""),
    "ici": ("ICI bandwidth by the ring model", "bytes that a chip sends"),
    "host": ("bandwidth of the link to the host", ""),
    "dcn": ("DCN bandwidth", ""),
}


@dataclass(frozen=True)
class Measured:
    """The part of a peak that ``kind`` reaches at ``size`` on ``chip``; empty: on any chip without rows of its own."""

    kind: str
    low: float
    middle: float
    high: float
    source: str
    size: float = 0.0
    chip: str = ""


_TOKAMAX = "openxla/tokamax, tpu7x, tuned, heads of 128, 192 and 256"
_AXLEARN = "apple/axlearn c40b39a5, v5p, 8,192 tokens, window 1,024, heads of 128"
_FORWARD = f"high: {_TOKAMAX}; low: {_AXLEARN}: 40 %"
_BACKWARD = f"high: {_TOKAMAX}; low: {_AXLEARN}: 30 %, one kernel"
_PALLAS = "docs.jax.dev/en/latest/pallas/tpu/matmul.html, v5e: 78.5 % at 4,096³, 91.5 at 8,192³"
_TILES = "tokamax #1221: tiles of 256 rows over 128"
_XLA = "docs.jax.dev/en/latest/pallas/tpu/matmul.html: XLA's product of 8,192³ on v5e, 6.05 ms for 6.37 by the cycles"

MEASURED: tuple[Measured, ...] = (
    Measured("compiler", 0.95, 1.0, 1.05, _XLA),
    Measured("compiler", 0.95, 1.1, 1.28, "8,192³ at 90 % of the peak, 70 by the cycles", chip="v6e"),
    Measured("attention_forward", 0.34, 0.38, 0.42, _FORWARD, 4096),
    Measured("attention_forward", 0.40, 0.45, 0.50, _FORWARD, 8192),
    Measured("attention_forward", 0.50, 0.56, 0.62, _FORWARD, 32768),
    Measured("attention_forward", 0.54, 0.61, 0.68, _FORWARD, 131072),
    Measured("attention_backward", 0.26, 0.38, 0.50, _BACKWARD, 4096),
    Measured("attention_backward", 0.30, 0.45, 0.60, _BACKWARD, 8192),
    Measured("attention_backward", 0.36, 0.53, 0.70, _BACKWARD, 32768),
    Measured("attention_backward", 0.38, 0.56, 0.74, _BACKWARD, 131072),
    Measured("gmm", 0.75, 0.82, 0.90, f"{_PALLAS}; {_TILES}: × 1.02 to 1.05 on v5p", 128),
    Measured("gmm", 0.785, 0.85, 0.915, _PALLAS, 256),
    Measured("gmm", 0.60, 0.70, 0.80, f"{_TILES}: × 1.06 to 1.3", 128, "v6e"),
    Measured("gmm", 0.70, 0.80, 0.90, f"{_PALLAS}; XLA's product of 8,192³: 90 %", 256, "v6e"),
    Measured("gmm", 0.37, 0.46, 0.60, f"{_TILES}: × 1.2 to 1.6", 128, "tpu7x"),
    Measured("gmm", 0.55, 0.64, 0.77, "XLA's products of 2k and 4k on tpu7x: 59 and 77 %", 256, "tpu7x"),
    Measured("tgmm", 0.70, 0.785, 0.86, f"{_PALLAS}; {_TILES}: × 1.02 to 1.05 on v5p", 128),
    Measured("tgmm", 0.72, 0.80, 0.88, f"{_PALLAS}; tiles are half as wide", 256),
    Measured("tgmm", 0.55, 0.65, 0.75, f"{_TILES}: × 1.06 to 1.3", 128, "v6e"),
    Measured("tgmm", 0.65, 0.75, 0.85, f"{_PALLAS}; tiles are half as wide", 256, "v6e"),
    Measured("tgmm", 0.35, 0.43, 0.57, f"{_TILES}: × 1.2 to 1.6", 128, "tpu7x"),
    Measured("tgmm", 0.52, 0.60, 0.74, "XLA's products of 2k and 4k on tpu7x: 59 and 77 %", 256, "tpu7x"),
    Measured("hbm", 0.83, 0.85, 0.87, "a copy on v6e and on tpu7x"),
    Measured("hbm", 0.80, 0.83, 0.85, "a copy: 1,360 GB/s", chip="v6e"),
    Measured("hbm", 0.75, 0.85, 0.87, "a copy: 6,400 GB/s, 75 % at 16 MiB", chip="tpu7x"),
    Measured("ici", 0.30, 0.36, 0.50, "all-gather on tpu7x: 72 GB/s", 1.6e6),
    Measured("ici", 0.75, 0.81, 0.90, "all-gather on tpu7x: 162 GB/s", 25e6),
    Measured("ici", 0.85, 0.90, 0.95, "all-gather on tpu7x: 179 GB/s; on v5e 95 %", 400e6),
    Measured("host", 0.5, 0.75, 1.0, "none found: no copy's rate was published"),
    Measured("dcn", 0.33, 0.6, 1.0, "an all-reduce between slices of v6e, one log: 4.1 GB/s"),
)


@functools.cache
def rows_of(kind: str, chip: str) -> tuple[Measured, ...]:
    """The rows of a kind for a chip, by size."""
    rows = [row for row in MEASURED if row.kind == kind]
    own = [row for row in rows if row.chip == chip] or [row for row in rows if not row.chip]
    return tuple(sorted(own, key=lambda row: row.size))


@dataclass(frozen=True)
class Reached:
    """The parts reached on a chip at one end of their ranges, or in the middle; ``given``: kind → part, any size."""

    chip: str
    which: Which = "middle"
    given: Mapping[str, float] = field(default_factory=dict)

    def __call__(self, kind: str, size: float = 0.0) -> float:
        if kind in self.given:
            return self.given[kind]
        rows = rows_of(kind, self.chip)
        parts: list[float] = [getattr(row, self.which) for row in rows]
        above = next((number for number, row in enumerate(rows) if row.size >= size), len(rows))
        if above in (0, len(rows)):
            return parts[min(above, len(rows) - 1)]
        low, high = rows[above - 1].size, rows[above].size
        return parts[above - 1] + (parts[above] - parts[above - 1]) * math.log(size / low) / math.log(high / low)
