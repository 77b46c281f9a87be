"""A weight's gradient, kept apart by batch shard, is summed up and laid out as the weight."""

from __future__ import annotations

import pytest
import torch
import torch_xla

from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import partition_spec
from shardwright.layout.placement import Shard
from shardwright.models.ops.collectives import rings
from shardwright.step import gradient_reduction
from shardwright.step.gradient_reduction import PartialGradient
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh, build_mesh


@pytest.fixture(scope="module")
def mesh():
    return build_mesh(Mesh(fsdp=2, expert=2, tensor=2))


# batch axes, layout of a weight [8, 12], batch shards inserted behind this many dimensions
CASES = {
    "two axes on one dimension": (("fsdp", "expert"), {"fsdp": Shard(0), "expert": Shard(0)}, 0),
    "two axes on two dimensions": (("fsdp", "expert"), {"fsdp": Shard(1), "expert": Shard(0)}, 0),
    "a third axis splits weights alone": (("fsdp", "expert"), {"fsdp": Shard(1), "tensor": Shard(1)}, 0),
    "not split": (("fsdp", "expert"), {}, 0),
    "layers stacked": (("fsdp", "tensor"), {"fsdp": Shard(0), "tensor": Shard(1)}, 1),
}


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_sum_over_batch_shards_is_whole_and_laid_out_as_the_weight(mesh, name, exchanges):
    axes, layout, dim = CASES[name]
    partial = PartialGradient("layers.*.weight", dim, axes, layout, 2, mesh, exchanges)
    assert partial.exchanged == (exchanges and dim == 0)
    values = torch.randn((3,) * dim + (partial.shards, 8, 12), generator=torch.Generator().manual_seed(0))
    placed = sharding.place("a partial gradient", values, mesh, partial.spec)
    total = partial.total(placed)
    torch_xla.sync()
    torch.testing.assert_close(sharding.fetch(total), values.sum(dim))
    spec = (None,) * dim + partition_spec(layout, 2, ("fsdp", "expert", "tensor"))
    sharding.check_placed({name: total}, mesh, {name: spec})


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("order", [range(8), (3, 1, 4, 0, 5, 7, 2, 6)])
def test_a_sum_ring_by_ring_is_the_sum(monkeypatch, exchanges, order):
    monkeypatch.setattr(gradient_reduction, "_LONGEST_RING", 4)
    mesh = DeviceMesh(list(order), (8,), ("fsdp",))
    partial = PartialGradient("layers.*.weight", 0, ("fsdp",), {"fsdp": Shard(1)}, 2, mesh, exchanges)
    assert len(partial.sum.scatter) == 2
    values = torch.randn((8, 8, 16), generator=torch.Generator().manual_seed(0))
    total = partial.total(sharding.place("a partial gradient", values, mesh, partial.spec))
    torch_xla.sync()
    torch.testing.assert_close(sharding.fetch(total), values.sum(0))


@pytest.mark.parametrize(
    ("size", "longest", "expected"),
    [
        (8, 15, [8]),
        (64, 16, [16, 4]),
        (256, 16, [16, 16]),
        (48, 16, [16, 3]),
        (34, 16, [2, 17]),
        (256, 4, [4, 4, 4, 4]),
        # never all the devices at once, but for a prime number of them
        (16, 15, [8, 2]),
        (8, 7, [4, 2]),
        (2, 1, [2]),
        (1, 0, [1]),
    ],
)
def test_a_long_axis_is_summed_over_ring_by_ring(size, longest, expected):
    assert list(rings("fsdp", size, longest).values()) == expected
