"""Several hosts: each reads its own rows of a batch, and its devices get what one host with all rows would send them.

A mesh of device numbers stands for the pod's; what is read and what is sent is the real code's.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from datasets import Dataset

from shardwright.data.rows.batches import TrainingBatches, heldout_batches
from shardwright.data.rows.rows import StoredRows
from shardwright.errors import UserError
from shardwright.layout.mesh import Mesh
from shardwright.step.train_step import _by_micro_batch
from shardwright.xla import runtime, sharding
from shardwright.xla.batch import HostRows, batch_share, batch_spec
from shardwright.xla.device_mesh import AbstractMesh, build_mesh
from shardwright.xla.sharding import shard_slices

ROWS = StoredRows(Dataset.from_dict({"input_ids": torch.arange(100 * 3).view(100, 3).tolist()}))

# axes of the mesh, those that split the batch, devices a host: what each host reads
MESHES = {
    "the batch over every device": ({"fsdp": 4, "expert": 2}, ("fsdp", "expert"), 4, [(0, 2), (1, 2)]),
    "four hosts": ({"data": 2, "fsdp": 4}, ("data", "fsdp"), 2, [(0, 4), (1, 4), (2, 4), (3, 4)]),
    "tensor inside a host": ({"fsdp": 4, "tensor": 2}, ("fsdp",), 4, [(0, 2), (1, 2)]),
    "tensor across hosts": ({"fsdp": 2, "tensor": 4}, ("fsdp",), 2, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    "no batch axis splits hosts": ({"tensor": 4, "fsdp": 2}, ("fsdp",), 2, [(0, 1)] * 4),
    "one host": ({"fsdp": 4, "expert": 2}, ("fsdp", "expert"), 8, [(0, 1)]),
    "rows not in the hosts' order": ({"fsdp": 4, "expert": 2}, ("expert", "fsdp"), 4, [(0, 1), (0, 1)]),
}


def hosts_of(mesh: AbstractMesh, devices_a_host: int) -> list[list[int]]:
    return np.arange(mesh.size()).reshape(-1, devices_a_host).tolist()


@pytest.mark.parametrize("case", MESHES)
def test_a_host_reads_the_rows_of_its_devices_and_no_others(case: str) -> None:
    axes, batch_axes, devices_a_host, expected = MESHES[case]
    mesh = AbstractMesh(axes)
    assert [batch_share(mesh, batch_axes, host) for host in hosts_of(mesh, devices_a_host)] == expected


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", MESHES)
def test_every_device_gets_the_rows_that_one_host_would_send_it(case: str, accumulation: int) -> None:
    axes, batch_axes, devices_a_host, _ = MESHES[case]
    mesh = AbstractMesh(axes)
    micro_batch = 2 * math.prod(axes[axis] for axis in batch_axes)
    rows = accumulation * micro_batch
    one = _by_micro_batch(next(TrainingBatches(ROWS, rows, seed=0))["input_ids"], accumulation)
    scored = next(heldout_batches(ROWS, micro_batch))["labels"]
    for host in hosts_of(mesh, devices_a_host):
        index, count = batch_share(mesh, batch_axes, host)
        batches = TrainingBatches(ROWS, rows, seed=0, process_index=index, process_count=count)
        held = HostRows(_by_micro_batch(next(batches)["input_ids"], accumulation), index, count)
        assert held.shape == one.shape
        assert len(held.held) == len(one) // count
        evaluated = HostRows(next(heldout_batches(ROWS, micro_batch, index, count))["labels"], index, count)
        for device in host:
            for whole, mine in ((one, held), (scored, evaluated)):
                where = shard_slices("x", whole.shape, mesh, batch_spec(whole.dim(), batch_axes), device)
                assert (mine[where] == whole[where]).all()


def test_hosts_score_every_held_out_row_once_in_batches_of_one_shape() -> None:
    hosts = [list(heldout_batches(ROWS, 16, index, 4)) for index in range(4)]
    assert {len(batches) for batches in hosts} == {7}, "no host waits for another"
    labels = torch.cat([batch["labels"] for batches in hosts for batch in batches])
    assert {tuple(batch["labels"].shape) for batches in hosts for batch in batches} == {(4, 3)}
    scored = labels[(labels != -100).all(dim=1)]
    assert sorted(scored[:, 0].tolist()) == list(range(0, 300, 3))


def test_a_placed_share_is_the_global_batch_on_the_devices() -> None:
    """As far as one process can go: its share is the whole, read through the same slices."""
    mesh = build_mesh(Mesh(fsdp=4, tensor=2))
    assert batch_share(mesh, ("fsdp",)) == (0, 1)
    values = torch.arange(24).view(8, 3)
    placed = sharding.place("x", HostRows(values, 0, 1), mesh, batch_spec(2, ("fsdp",)))
    assert (sharding.fetch(placed) == values).all()


@pytest.mark.parametrize(
    ("told", "place"),
    [
        ({"TPU_WORKER_HOSTNAMES": "t1v-0,t1v-1"}, ("t1v-0", 8546)),
        ({"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_COORDINATOR_ADDRESS": "slice-0:8080"}, ("slice-0", 8546)),
        ({"MEGASCALE_COORDINATOR_ADDRESS": "dns:///job-0-0.job"}, ("job-0-0.job", 8546)),
        ({"MASTER_ADDR": "first", "MASTER_PORT": "9000", "TPU_WORKER_HOSTNAMES": "a,b"}, ("first", 9000)),
        ({"MASTER_ADDR": "first", "MASTER_PORT": ""}, ("first", 8546)),
    ],
)
def test_the_hosts_come_together_at_the_first_of_the_whole_job(told, place) -> None:
    """On slices of one host, TPU_WORKER_HOSTNAMES names "localhost", which is another machine on each of them."""
    assert runtime.meeting_place(told) == place
    for other in ("tcp://10.0.0.1:80", "65536", "-1"):
        with pytest.raises(UserError, match=f"MASTER_PORT={other}"):
            runtime.meeting_place({**told, "MASTER_PORT": other})
