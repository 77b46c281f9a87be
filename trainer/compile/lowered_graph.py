"""Lowered: a graph of a run as HLO, before the compiler partitions it, and what each of its arguments is."""

from __future__ import annotations

from dataclasses import dataclass

from shardwright.step.auto_remat import LayerValue

TRAIN_STEP = "train step"


@dataclass(frozen=True)
class Argument:
    """One parameter of the lowered step's HLO.

    Args:
        name: as the recipe has it, ``model.layers.*.mlp.experts.gate_up_proj``; a moment has " first moment" behind it.
        kind: ``weights``, ``optimizer``, ``batch`` or ``other``.
        shape: global.
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
        arguments: its parameters, in order.
        outputs: each output's sharding, in HLO's text.
        mesh: axis → size, in mesh order; HLO's device ids are positions in it, row-major.
        layers: how often the longest loop over layers runs.
        graph: which of the run's graphs it is.
        values: of a train step that keeps a share of its layers' values, what those are and which it keeps.
    """

    hlo: bytes
    arguments: tuple[Argument, ...]
    outputs: tuple[str, ...]
    mesh: dict[str, int]
    layers: int
    graph: str = TRAIN_STEP
    values: tuple[LayerValue, ...] = ()
