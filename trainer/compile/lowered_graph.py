"""A lowered graph of a run: HLO before the compiler partitions it, with a description of each argument."""

from dataclasses import dataclass

from shardwright.layout.partition import PartitionSpec
from shardwright.step.auto_remat import LayerValue

TRAIN_STEP = "train step"


@dataclass(frozen=True)
class Argument:
    """One parameter of the lowered step's HLO."""

    name: str  # as the recipe has it, `model.layers.*.mlp.experts.up_proj`; a moment has " first moment" behind it
    kind: str  # `weights`, `optimizer`, `batch` or `other`
    shape: tuple[int, ...]  # global
    dtype: str
    spec: PartitionSpec
    output: int | None  # number of the output that takes its place in memory; None: it is not donated


@dataclass(frozen=True)
class LoweredGraph:
    """A graph of a run as HLO, before it is partitioned."""

    hlo: bytes  # a serialised HloModuleProto
    arguments: tuple[Argument, ...]
    outputs: tuple[PartitionSpec, ...]
    mesh: dict[str, int]  # axis → size, in mesh order; HLO's device ids are positions in it, row-major
    layers: int  # trip count of the longest loop over layers
    graph: str = TRAIN_STEP
    values: tuple[LayerValue, ...] = ()  # of a layer, and whether the train step keeps each, if it keeps a share
