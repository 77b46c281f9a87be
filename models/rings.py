"""A mesh axis cut into shorter rings, each a mesh axis of its own."""

from __future__ import annotations


def rings(axis: str, size: int, longest: int) -> dict[str, int]:
    """``axis`` cut into rings of at most ``longest`` devices: name → size, outermost first.

    A collective over all the axis is one over each of its rings, one after another.
    """
    sizes = []
    while size > longest and (ring := max((d for d in range(1, longest + 1) if size % d == 0), default=1)) > 1:
        sizes.append(ring)
        size //= ring
    return {f"{axis}.{i}": ring for i, ring in enumerate([*sizes, size])}
