"""The weights of a running model as a source."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch_xla.distributed.spmd as xs
from torch import nn

from trainer.arrays import Array, Slices
from trainer.layout.plan import ParameterPlan, ShardingPlan
from trainer.weights.place import layer_batches, specs_of
from trainer.xla import sharding
from trainer.xla.runtime import run_now


class LiveWeights:
    """A source over placed parameters: the weights of a running model, a layer's parameter at a time on the host.

    It keeps the layer that it read last: make one for each use, with the weights at rest.

    Args:
        model: the assembled model, for its buffers.
        plan: of ``parameters`` as they are stored.
    """

    def __init__(
        self, model: nn.Module, plan: ShardingPlan, mesh: xs.Mesh, parameters: Mapping[str, torch.Tensor]
    ) -> None:
        self.model, self.plan, self.mesh, self.parameters = model, plan, mesh, parameters
        batches = layer_batches([entry for entry in plan.parameters if ".*." in entry.name])
        self._row_of = {
            member: (entry, batch, index)
            for batch in batches
            for entry in batch
            for index, member in enumerate(plan.members(entry.name))
        }
        self._rows: tuple[object, dict[str, torch.Tensor]] = (None, {})  # of one layer, on the devices

    def __call__(self, name: str) -> Array:
        """The values of a parameter or persistent buffer, fetched whole from the devices at each reading."""
        name = self.plan.aliases.get(name, name)
        if name in self._row_of:
            entry, _, _ = self._row_of[name]
            return _Fetched(entry.shape[1:], entry.dtype, lambda: self._row(name))
        tensor = self.parameters[name] if name in self.parameters else self.model.get_buffer(name)
        return _Fetched(tuple(tensor.shape), tensor.dtype, lambda: tensor)

    def _row(self, name: str) -> torch.Tensor:
        entry, batch, index = self._row_of[name]
        key = (batch[0].name, index)
        if self._rows[0] != key:
            self._rows = (None, {})  # let go of the last one first
            self._rows = (key, self._read_rows(batch, index))
        return self._rows[1][entry.name]

    def _read_rows(self, batch: Sequence[ParameterPlan], index: int) -> dict[str, torch.Tensor]:
        """A layer of each of the stacks, laid out as they are: one compile a batch, for all layers."""
        specs, where = specs_of(self.plan), sharding.place("layer", torch.tensor([index]), self.mesh, (None,))
        with torch.no_grad():
            rows = {
                entry.name: sharding.constrain(
                    self.parameters[entry.name].index_select(0, where).squeeze(0), self.mesh, specs[entry.name][1:]
                )
                for entry in batch
            }
        run_now(list(rows.values()))
        return rows


@dataclass(frozen=True)
class _Fetched:
    """An array on the devices."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    tensor: Callable[[], torch.Tensor]

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return sharding.fetch(self.tensor().detach())[where]


def unstacked(plan: ShardingPlan, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(the model's own name, values on the CPU), one placed parameter at a time."""
    for name, parameter in parameters.items():
        members = plan.members(name)
        value = sharding.fetch(parameter.detach())
        yield from zip(members, value.unbind() if members != [name] else [value], strict=True)
