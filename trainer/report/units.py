"""Quantities as a person reads them."""

from __future__ import annotations


def size(count: float, decimals: int = 1) -> str:
    """Bytes as a person reads them: ``53.8 GiB``, ``640.0 KiB``, ``12 B``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.{decimals}f} {unit}"
    return f"{count:,.0f} B"
