"""A lowered graph of a run: HLO before the compiler partitions it, with a description of each argument."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.step.auto_remat import LayerValue

TRAIN_STEP = "train step"


@dataclass(frozen=True)
class Argument:
    """One parameter of the lowered step's HLO, with its global shape.

    Args:
        name: as the recipe has it, ``model.layers.*.mlp.experts.gate_up_proj``; a moment has " first moment" behind it.
        kind: ``weights``, ``optimizer``, ``batch`` or ``other``.
        sharding: HLO's text, ``{devices=[8,1]<=[8]}`` or ``{replicated}``.
        output: number of the output that takes its place in memory; None: it is not donated.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    sharding: str
    output: int | None


@dataclass(frozen=True)
class LoweredGraph:
    """A graph of a run as HLO, before it is partitioned.

    Args:
        hlo: a serialised HloModuleProto.
        outputs: each output's sharding, in HLO's text.
        mesh: axis → size, in mesh order; HLO's device ids are positions in it, row-major.
        layers: trip count of the longest loop over layers.
        values: values of a layer and whether the train step keeps them, if it keeps a share.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    mesh: dict[str, int]
    layers: int
    graph: str = TRAIN_STEP
    values: tuple[LayerValue, ...] = ()
