"""A source that reads a running model's weights back from the devices, a parameter at a time."""

from collections.abc import Callable

import torch
from torch import nn

from shardwright.files.arrays import Array, LazyArray, Slices, keeping_last, layer_of
from shardwright.hosts.hosts import hosts
from shardwright.layout.plan import ShardingPlan
from shardwright.layout.stacking import is_stacked, layer_names
from shardwright.models.ops.partial_gradients import Tensors
from shardwright.weights.place import layer_batches, read_layer
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh
from shardwright.xla.runtime import run_now


class LiveWeights:
    """A source that reads placed ``parameters``, stored as in ``plan``, and the buffers of the assembled ``model``.

    The host holds one layer's parameter at a time. It keeps the layer read last, so make one for each use, while no
    step changes the weights.
    """

    def __init__(self, model: nn.Module, plan: ShardingPlan, mesh: DeviceMesh, parameters: Tensors) -> None:
        self.model, self.plan, self.mesh, self.parameters = model, plan, mesh, parameters
        self._batches = layer_batches([entry for entry in plan.parameters if is_stacked(entry.name)])
        self._row_of = {
            member: (entry, number, index)
            for number, batch in enumerate(self._batches)
            for entry in batch
            for index, member in enumerate(plan.members(entry.name))
        }
        # name of a layer's buffer in a stack -> (stack, layer)
        self._buffers = {
            member: (buffer, layer)
            for name, buffer in model.named_buffers()
            if is_stacked(name)
            for layer, member in enumerate(layer_names(name, len(buffer)))
        }
        self._rows = keeping_last(self._read_rows)

    def __call__(self, name: str) -> Array:
        """A parameter or persistent buffer as an array; reading any slice fetches the whole."""
        name = self.plan.aliases.get(name, name)
        if name in self._row_of:
            entry, number, index = self._row_of[name]
            return _fetch_when_read(entry.shape[1:], entry.dtype, lambda: self._rows((number, index))[entry.name])
        if name in self._buffers:
            buffer, layer = self._buffers[name]
            return layer_of(_fetch_when_read(tuple(buffer.shape), buffer.dtype, lambda: buffer), layer)
        tensor = self.parameters[name] if name in self.parameters else self.model.get_buffer(name)
        return _fetch_when_read(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def _read_rows(self, place: tuple[int, int]) -> Tensors:
        """A layer of each stack in a batch, on the devices; its index is data, so a batch is compiled once."""
        number, index = place
        where = sharding.place("layer", torch.tensor([index]), self.mesh, (None,))
        stacks = {entry.name: self.parameters[entry.name] for entry in self._batches[number]}
        rows = read_layer(stacks, where, self.plan, self.mesh)
        run_now(list(rows.values()))
        return rows


def _fetch_when_read(shape: tuple[int, ...], dtype: torch.dtype, tensor: Callable[[], torch.Tensor]) -> Array:
    def read(where: Slices) -> torch.Tensor:
        hosts().watchdog.progressed()
        return sharding.fetch(tensor().detach())[where]

    return LazyArray(shape, dtype, read)
