"""Quantities as a person reads them."""

from __future__ import annotations


def size(count: float) -> str:
    """Bytes as a person reads them: ``53.8 GiB``, ``640 KiB``."""
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= scale:
            return f"{count / scale:,.1f} {unit}"
    return f"{count:,.0f} B"
