"""Weights in, a parameter at a time, from any source onto the devices; and back from there, a parameter at a time."""

from __future__ import annotations

import copy
import itertools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
from torch import nn
from transformers import PreTrainedModel

from trainer import sharding
from trainer.errors import UserError
from trainer.plan import ParameterPlan, ShardingPlan, partition_spec
from trainer.step import run_now

# the model's own (unstacked) parameter or buffer name -> its values, which can be read by slices
Source = Callable[[str], sharding.Array]
Specs = dict[str, sharding.PartitionSpec]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """The model's own random init, a module at a time, each from a seed of its own.

    So the values depend on neither mesh nor order, and the host holds one module. ``model`` is on meta and stays so.
    """

    def source(name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{owner}".encode()))
            model._init_weights(module)
        return getattr(module, key).detach()

    return source


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """The values of a state dict with the model's own names."""
    return lambda name: tensors[name].detach()


def place_parameters(model: nn.Module, plan: ShardingPlan, mesh: xs.Mesh, source: Source) -> dict[str, torch.Tensor]:
    """Fill ``model`` (on meta, perhaps stacked) from ``source``, each parameter laid out by ``plan``, in one pass.

    Of a stack the host holds no more than a layer: the stacks lie on the devices already, and layers are written into
    them. Tied parameters stay tied; buffers are replicated. Returns name -> parameter, in the model's order.

    Raises:
        UserError: layers that are stacked have buffers of their own in the checkpoint.
    """
    specs, stacked = _specs(plan), [entry for entry in plan.parameters if ".*." in entry.name]
    tensors: dict[str, torch.Tensor] = {}
    if isinstance(mesh, sharding.AbstractMesh):  # nothing to read, nowhere to write
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
                    _write_stacks(stacks, _batches(stacked), plan, mesh, source)
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
    specs = _specs(plan)
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


def _batches(stacked: Sequence[ParameterPlan]) -> list[list[ParameterPlan]]:
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
        batches = _batches([entry for entry in plan.parameters if ".*." in entry.name])
        self._row_of = {
            member: (entry, batch, index)
            for batch in batches
            for entry in batch
            for index, member in enumerate(plan.members(entry.name))
        }
        self._rows: tuple[object, dict[str, torch.Tensor]] = (None, {})  # of one layer, on the devices

    def __call__(self, name: str) -> sharding.Array:
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
        specs, where = _specs(self.plan), sharding.place("layer", torch.tensor([index]), self.mesh, (None,))
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

    def __getitem__(self, where: sharding.Slices) -> torch.Tensor:
        return sharding.fetch(self.tensor().detach())[where]


def _specs(plan: ShardingPlan) -> Specs:
    return {p.name: partition_spec(p.layout, len(p.shape), tuple(plan.mesh)) for p in plan.parameters}


def unstacked(plan: ShardingPlan, parameters: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """(the model's own name, values on the CPU), one placed parameter at a time."""
    for name, parameter in parameters.items():
        members = plan.members(name)
        value = sharding.fetch(parameter.detach())
        yield from zip(members, value.unbind() if members != [name] else [value], strict=True)


def _assign(model: nn.Module, name: str, parameter: torch.Tensor) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, parameter)
