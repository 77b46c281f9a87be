"""Places a model's weights on the devices, a parameter at a time, from any source; packed where planned."""

import itertools
import math
from collections.abc import Sequence

import torch
from torch import nn

from shardwright.files.arrays import Array, Stack
from shardwright.layout.plan import ParameterPlan, ShardingPlan
from shardwright.layout.stacking import is_stacked, layer_names
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.weights.packed_source import packed_source
from shardwright.weights.weight_sources import Source
from shardwright.xla import sharding
from shardwright.xla.device_mesh import AbstractMesh, DeviceMesh
from shardwright.xla.runtime import run_now, wait_for_devices


def place_parameters(model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, source: Source) -> Tensors:
    """Fills ``model`` (on meta, its layers stacked or not) from ``source``, each parameter laid out by ``plan``.

    Stacks are made on the devices and written there layer by layer, so the host holds one layer at most. Tied
    parameters stay tied; buffers are replicated. Returns name -> parameter, in the model's order.
    """
    source = packed_source(source, plan)
    specs, stacked = plan.specs, [entry for entry in plan.parameters if is_stacked(entry.name)]
    tensors: Tensors = {}
    owners = {**{entry.name: entry.name for entry in plan.parameters}, **plan.aliases}
    for alias in owners:  # frees earlier weights first: a chip need not have room for both
        _assign(model, alias, nn.Parameter(torch.empty((), device="meta")))
    if isinstance(mesh, AbstractMesh):  # it has no devices, so there is nothing to read
        for entry in plan.parameters:
            nothing = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
            tensors[entry.name] = sharding.place(entry.name, nothing, mesh, specs[entry.name])
    else:
        # made on the devices: zeros from the host would lie there first, whole
        stacks = {e.name: sharding.zeros_on_device(e.shape, e.dtype, mesh, specs[e.name]) for e in stacked}
        if stacks:
            run_now(list(stacks.values()))
        for entry in plan.parameters:
            if entry not in stacked:
                name = entry.name
                tensors[name] = sharding.place(name, source(name), mesh, specs[name], entry.dtype)
            elif entry is stacked[0]:  # here, to read in the model's order, which is that of most files
                _write_stacks(stacks, plan, mesh, source)
        tensors |= stacks
    placed: Tensors = {
        entry.name: nn.Parameter(tensors[entry.name], entry.trained and entry.dtype.is_floating_point)
        for entry in plan.parameters
    }
    for alias, name in owners.items():
        _assign(model, alias, placed[name])
    place_buffers(model, mesh, source)
    left = [name for name, t in itertools.chain(model.named_parameters(), model.named_buffers()) if t.is_meta]
    assert not left, f"left without data: {left}"
    return placed


def _write_stacks(stacks: Tensors, plan: ShardingPlan, mesh: DeviceMesh, source: Source) -> None:
    """Writes the layers one after the other, in place; their number is data, so each batch is compiled once."""
    specs, batches = plan.specs, layer_batches([entry for entry in plan.parameters if entry.name in stacks])
    for index in range(max(batch[0].shape[0] for batch in batches)):
        where = sharding.place("layer", torch.tensor([index]), mesh, (None,))
        for batch in batches:
            if index >= batch[0].shape[0]:
                continue
            rows = {}
            for entry in batch:
                name = plan.members(entry.name)[index]
                rows[entry.name] = sharding.place(name, source(name), mesh, specs[entry.name][1:], entry.dtype)
            write_layer({name: stacks[name] for name in rows}, rows, where, plan, mesh)
            run_now([stacks[name] for name in rows])
            del rows
            wait_for_devices()  # or torch_xla's copies of layers pile up on the host


def write_layer(stacks: Tensors, rows: Tensors, where: torch.Tensor, plan: ShardingPlan, mesh: DeviceMesh) -> None:
    """Traces writing ``rows`` into layer ``where`` [1] of each stack, in place."""
    with torch.no_grad():
        for name, row in rows.items():
            updated = stacks[name].index_copy(0, where, row.unsqueeze(0))
            stacks[name].copy_(sharding.constrain(updated, mesh, plan.specs[name]))


def read_layer(stacks: Tensors, where: torch.Tensor, plan: ShardingPlan, mesh: DeviceMesh) -> Tensors:
    """Traces layer ``where`` [1] of each stack, laid out as the stack is."""
    with torch.no_grad():
        return {
            name: sharding.constrain(stack.index_select(0, where).squeeze(0), mesh, plan.specs[name][1:])
            for name, stack in stacks.items()
        }


def layer_batches(stacked: Sequence[ParameterPlan]) -> list[list[ParameterPlan]]:
    """Groups stacks of equal depth into few batches, a layer of which is no larger than the largest parameter's."""
    sizes = {entry.name: entry.dtype.itemsize * math.prod(entry.shape[1:]) for entry in stacked}
    batches: list[list[ParameterPlan]] = []
    for entry in sorted(stacked, key=lambda entry: -sizes[entry.name]):
        for batch in batches:
            fits = sum(sizes[other.name] for other in batch) + sizes[entry.name] <= max(sizes.values())
            if fits and batch[0].shape[0] == entry.shape[0]:
                batch.append(entry)
                break
        else:
            batches.append([entry])
    return batches


def place_buffers(model: nn.Module, mesh: DeviceMesh, source: Source) -> None:
    """Replicates the buffers, most of which are in no checkpoint (RoPE's frequencies) but built with the model."""
    saved = model.state_dict().keys()
    for name, buffer in list(model.named_buffers()):
        values: Array = buffer.cpu()
        if name in saved:
            values = Stack([source(n) for n in layer_names(name, len(buffer))]) if is_stacked(name) else source(name)
        _assign(model, name, sharding.place(name, values, mesh, (None,) * buffer.dim(), buffer.dtype))


def _assign(model: nn.Module, name: str, tensor: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, tensor)
