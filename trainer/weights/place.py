"""Weights in, a parameter at a time, from any source onto the devices; and back from there, a parameter at a time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn

from trainer.errors import UserError
from trainer.layout.partition import PartitionSpec, partition_spec
from trainer.layout.plan import ParameterPlan, ShardingPlan
from trainer.weights.sources import Source
from trainer.xla import sharding
from trainer.xla.mesh import AbstractMesh
from trainer.xla.runtime import run_now

Specs = dict[str, PartitionSpec]


def place_parameters(model: nn.Module, plan: ShardingPlan, mesh: xs.Mesh, source: Source) -> dict[str, torch.Tensor]:
    """Fill ``model`` (on meta, perhaps stacked) from ``source``, each parameter laid out by ``plan``, in one pass.

    Of a stack the host holds no more than a layer: the stacks lie on the devices already, and layers are written into
    them. Tied parameters stay tied; buffers are replicated. Returns name -> parameter, in the model's order.

    Raises:
        UserError: layers that are stacked have buffers of their own in the checkpoint.
    """
    specs, stacked = specs_of(plan), [entry for entry in plan.parameters if ".*." in entry.name]
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(mesh, AbstractMesh):  # nothing to read, nowhere to write
        for entry in plan.parameters:
            nothing = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            tensors[entry.name] = sharding.place(entry.name, nothing, mesh, specs[entry.name])
    else:
        with _threads_for_copies():
            stacks = _zero_stacks(stacked, mesh, specs)
            for entry in plan.parameters:
                if entry not in stacked:
                    name = entry.name
                    tensors[name] = sharding.place(name, source(name), mesh, specs[name], entry.dtype)
                elif entry is stacked[0]:  # in the model's order, which is the order of most files
                    _write_stacks(stacks, layer_batches(stacked), plan, mesh, source)
        tensors |= stacks
    placed: dict[str, torch.Tensor] = {entry.name: nn.Parameter(tensors[entry.name]) for entry in plan.parameters}
    for alias, name in [*zip(placed, placed, strict=True), *plan.aliases.items()]:
        _assign(model, alias, placed[name])
    _place_buffers(model, mesh, source)
    left = [name for name, t in itertools.chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    assert not left, f"left without data: {left}"
    return placed


@contextmanager
def _threads_for_copies() -> Iterator[None]:
    """One where the devices are the CPU too: torch's threads wait for each other spinning, on cores that those need."""
    threads = torch.get_num_threads()
    if xr.device_type() == "CPU":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _zero_stacks(stacked: Sequence[ParameterPlan], mesh: xs.Mesh, specs: Specs) -> dict[str, torch.Tensor]:
    """The stacks, zero, made on the devices: zeros that came from the host would all be there first."""
    device = torch_xla.device()
    zeros = {
        entry.name: sharding.constrain(
            torch.zeros(entry.shape, dtype=entry.dtype, device=device), mesh, specs[entry.name]
        )
        for entry in stacked
    }
    if zeros:
        run_now(list(zeros.values()))
    return zeros


def _write_stacks(
    stacks: dict[str, torch.Tensor],
    batches: Sequence[Sequence[ParameterPlan]],
    plan: ShardingPlan,
    mesh: xs.Mesh,
    source: Source,
) -> None:
    """Write the layers, one after the other, into the stacks, in place: the old stack is donated to the new.

    The number of the layer goes in as data, so there is one compile for each batch of parameters.
    """
    specs = specs_of(plan)
    for index in range(batches[0][0].shape[0]):
        where = sharding.place("layer", torch.tensor([index]), mesh, (None,))
        for batch in batches:
            rows = {}
            for entry in batch:
                name = plan.members(entry.name)[index]
                rows[entry.name] = sharding.place(name, source(name), mesh, specs[entry.name][1:], entry.dtype)
            with torch.no_grad():
                for name, row in rows.items():
                    updated = stacks[name].index_copy(0, where, row.unsqueeze(0))
                    stacks[name].copy_(sharding.constrain(updated, mesh, specs[name]))
            run_now([stacks[name] for name in rows])
            del rows, row
            xm.wait_device_ops()  # else torch_xla's copies of what is under way pile up on the host


def layer_batches(stacked: Sequence[ParameterPlan]) -> list[list[ParameterPlan]]:
    """Parameters in few batches, of which a layer is no larger than that of the largest parameter."""
    sizes = {entry.name: entry.dtype.itemsize * math.prod(entry.shape[1:]) for entry in stacked}
    batches: list[list[ParameterPlan]] = []
    for entry in sorted(stacked, key=lambda entry: -sizes[entry.name]):
        for batch in batches:
            if sum(sizes[other.name] for other in batch) + sizes[entry.name] <= max(sizes.values()):
                batch.append(entry)
                break
        else:
            batches.append([entry])
    return batches


def _place_buffers(model: nn.Module, mesh: xs.Mesh, source: Source) -> None:
    """Replicate the buffers. Most are in no file (RoPE's frequencies) and were built with the model."""
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        if name in saved and ".*." in name:
            raise UserError(
                asked=f"layers stacked, as Compute(scan=True) has them, with the buffer {name}",
                found="it is part of a checkpoint, and has other values in each layer",
                why="only parameters are stacked",
                instead="Compute(scan=False)",
            )
        values = source(name) if name in saved else buffer.cpu()
        owner, _, key = name.rpartition(".")
        model.get_submodule(owner)._buffers[key] = sharding.place(
            name, values, mesh, (None,) * buffer.dim(), buffer.dtype
        )


def specs_of(plan: ShardingPlan) -> Specs:
    return {p.name: partition_spec(p.layout, len(p.shape), tuple(plan.mesh)) for p in plan.parameters}


def _assign(model: nn.Module, name: str, parameter: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, parameter)
