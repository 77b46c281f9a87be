"""The training step without weights: placeholders → HLO with the plan's shardings."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Argument:
    """One parameter of the lowered step's HLO, in order.

    Args:
        name: as the recipe says it, ``model.layers.*.mlp.experts.gate_up_proj``, its moments with " first moment", ….
        kind: ``weights``, ``optimizer``, ``batch`` or ``other``.
        shape: global.
        sharding: HLO's text, ``{devices=[8,1]<=[8]}`` or ``{replicated}``.
        output: the output that takes its place in memory; None: not donated.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    output: int | None


@dataclass(frozen=True)
class Lowered:
    """A training step as HLO, before it is partitioned.

    Args:
        hlo: a serialised HloModuleProto.
        outputs: each output's sharding, HLO's text.
        mesh: axis → size, in mesh order; HLO's device ids are positions in it, row-major.
        layers: how often the loops over the layer stack run.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    mesh: dict[str, int]
    layers: int
