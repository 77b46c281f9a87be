"""Sizes and times as text, and sizes back."""

import math
import re
from collections.abc import Iterable, Mapping

_SCALES = {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


def size(count: float, decimals: int = 1) -> str:
    """Bytes as text: ``53.8 GiB``, ``640.0 KiB``, ``12 B``; ``decimals`` for any unit but the byte."""
    for unit, scale in _SCALES.items():
        if count >= scale:
            return f"{count / scale:,.{decimals}f} {unit}"
    return f"{count:,.0f} B"


def mesh_text(sizes: Mapping[str, int], axes: Iterable[str] | None = None) -> str:
    """``axes``, or all, with their sizes: ``fsdp=2 × expert=4``."""
    return " × ".join(f"{axis}={sizes[axis]}" for axis in (sizes if axes is None else axes))


def duration(seconds: float | None) -> str:
    """Seconds as ``4:05``, ``1:02:30`` or ``2 d 3:04:05``; None, not known: ``?``."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if days or hours else f"{minutes}:{rest:02}"
    return f"{days} d {clock}" if days else clock


def parse_size(text: str) -> int:
    """Bytes, rounded up, from XLA's short form: ``28.09G``, ``512B``, ``640``; 0: ``text`` is no size."""
    match = re.fullmatch(r"([\d.]+)([BKMGT]?)", text)
    return math.ceil(float(match[1]) * _SCALES.get(f"{match[2]}iB", 1)) if match else 0
