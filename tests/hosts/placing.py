"""What each host of several does with tensors; run by test_placing.py on all of them at once."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from shardwright.errors import UserError
from shardwright.files.folder import StorageError
from shardwright.hosts.hosts import hosts
from shardwright.layout.mesh import Mesh
from shardwright.step.compile_guard import CompileGuard
from shardwright.xla import sharding
from shardwright.xla.batch import batch_share, place_batch
from shardwright.xla.device_mesh import build_mesh, local_devices
from shardwright.xla.runtime import init_runtime, run_now


class Counted:
    """An array that counts the elements that are read of it."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.dtype, self.read = values, tuple(values.shape), values.dtype, 0

    def __getitem__(self, where):
        found = self.values[where]
        self.read += found.numel()
        return found


init_runtime()
job = hosts()
mesh = build_mesh(Mesh(fsdp=4, tensor=2))
assert len(local_devices()) * job.count == 8

# specs, and the part of the tensor that the devices of one host hold
SPECS = {("fsdp", None): 1 / job.count, (("fsdp", "tensor"), None): 1 / job.count, (None, "tensor"): 1, (None, None): 1}
for dtype in (torch.float32, torch.bfloat16, torch.int8):
    for spec, part in SPECS.items():
        whole = torch.arange(8 * 16).view(8, 16).to(dtype)
        array = Counted(whole)
        placed = sharding.place("x", array, mesh, spec)
        assert array.read == whole.numel() * part, (spec, array.read)
        assert torch.equal(sharding.fetch(placed), whole), (spec, dtype)
        # all hosts together keep each element once
        kept = [where for where, _ in sharding.shards(placed)]
        held = np.zeros(whole.shape, int)
        for theirs in job.gather([tuple(part.indices(16)[:2] for part in where) for where in kept]):
            for (a, b), (c, d) in theirs:
                held[a:b, c:d] += 1
        assert (held == 1).all(), (spec, held)

# in pieces: along the longest part that a device holds, with a last piece that overlaps, and of one row at least
values = torch.arange(-384.0, 384.0).view(6, 16, 8) / 7
values[0] = -0.0  # which a sum over devices would make 0
for sharding.PIECE in (1000, 1):
    for spec in ((None, "fsdp", "tensor"), (None, ("fsdp", "tensor"), None), (None, None, None)):
        for whole in (values, values.to(torch.bfloat16), values.to(torch.int8)):
            found = sharding.fetch(sharding.place("stack", whole, mesh, spec))
            assert torch.equal(found.view(torch.int8), whole.view(torch.int8)), (sharding.PIECE, spec, whole.dtype)
sharding.PIECE = 1 << 30

assert sharding.fetch(sharding.place("scalar", torch.tensor(3.0), mesh, ())) == 3

# rows: each host gives its own, and the batch is whole on the devices
index, count = batch_share(mesh, ("fsdp",))
assert (index, count) == (job.index, job.count)
rows = torch.arange(16 * 3).view(16, 3)
batch = place_batch({"rows": rows.chunk(count)[index]}, mesh, ("fsdp",))
assert torch.equal(sharding.fetch(batch["rows"]), rows)

# a step that compiles again names its operation, though a computation that it reads still runs when it is first traced
square = sharding.place("square", torch.full((400, 400), 1 / 400), mesh, ("fsdp", None))
running = square
for _ in range(40):
    running = torch.tanh(running @ square)
run_now([running])
guard = CompileGuard("step", expected=1)
guard.run({"square": square}, lambda batch: {"result": torch.cos(running)})
with pytest.raises(UserError, match=rf"first new operation is sine of f32\[400,400\], from {__file__}:\d+"):
    guard.run({"square": square}, lambda batch: {"result": torch.sin(running)})

# words
assert job.gather(job.index) == list(range(job.count))
assert job.once(lambda: f"by {job.index}") == "by 0"


def refusing(host: int, kind: type[UserError]):
    def act() -> None:
        job.gather("on the way")  # where the others are when one refuses
        if job.index == host:
            raise kind(asked="a", found="b", why="c", instead="d")
        job.gather("and further")
        job.once(lambda: math.pi)

    return act


for host in range(job.count):
    for kind in (UserError, StorageError):
        with pytest.raises(kind) as caught:
            job.together(refusing(host, kind))
        assert type(caught.value) is kind
        assert caught.value.found == (f"on host {host}: b" if host else "b")
job.check_same({"a": "1"})
with pytest.raises(UserError, match=f"b: 0 on host 0, 1 on host {job.count - 1}"):
    job.check_same({"a": "1", "b": str(int(job.index == job.count - 1))})
other = job.beside()
assert other.gather(job.index) == list(range(job.count))
print("well")
