"""Parameters made ready for the forward: their dtypes, layouts and partial gradients."""

from collections.abc import Collection

import torch
from torch import Tensor
from torch_xla import backends

from shardwright.job import Job
from shardwright.layout.mesh import SEQUENCE
from shardwright.layout.partition import partition_spec
from shardwright.layout.plan import ParameterPlan
from shardwright.layout.recipe import Layout
from shardwright.layout.stacking import first_name, is_stacked
from shardwright.models.adapters.packings.registry import SCALE
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.routing import selection_biases
from shardwright.models.ops import jax_call
from shardwright.models.ops.device_kernels import kernels
from shardwright.models.ops.fusion_barrier import apart
from shardwright.models.ops.partial_gradients import SUFFIX, Tensors
from shardwright.models.ops.stored_layout import as_stored
from shardwright.step.gradient_reduction import PartialGradient, token_axes
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh, device_order

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def compute_dtype(job: Job) -> torch.dtype:
    return DTYPES[job.recipe.compute.dtype or kernels().COMPUTE_DTYPE]


class Prepare:
    """Parameters → tensors for the forward, by name: each cast and laid out, and the leaf of its partial gradient."""

    def __init__(self, job: Job, mesh: DeviceMesh, partials: dict[str, PartialGradient]) -> None:
        self.job, self.mesh, self.partials = job, mesh, partials
        self.dtype = compute_dtype(job)
        if self.dtype == torch.float32 and jax_call.target() == "cuda":
            # by default its factors are rounded to TF32's 10 bits
            backends.set_mat_mul_precision("highest")
        self.experts_inside = experts_modules(job.assembled)
        self.biases = selection_biases(job.model, job.facts.experts)

    def __call__(self, parameters: Tensors) -> Tensors:
        prepared: Tensors = {}
        packed = {name for name in parameters if not name.endswith(SUFFIX) and self._entry(name).packed}
        for name, parameter in parameters.items():  # leaves come last: a given one replaces ours
            if name.endswith(SUFFIX):
                spec = self.partials[name.removesuffix(SUFFIX)].spec
                prepared[name] = sharding.constrain(parameter, self.mesh, spec[-parameter.dim() :])
            elif name in packed:
                prepared |= self._unpacked(name, parameter, parameters[name + SCALE])
            elif name.removesuffix(SCALE) not in packed:
                prepared |= self._cast(name, parameter)
        return prepared

    def in_a_loop(self, parameters: Tensors) -> Tensors:
        """The same for a layer's slices of stacks: one that isn't cast would choose the whole stack's layout."""
        return self({name: self._as_stored(name, parameter) for name, parameter in parameters.items()})

    def _cast(self, name: str, parameter: Tensor) -> Tensors:
        # cast first, so that devices gather the smaller dtype
        entry, partial = self._entry(name), self.partials.get(name)
        # the biases that routers add for selection stay as they are: in bfloat16 a step of 0.001 would be lost
        cast = parameter if entry.name in self.biases else parameter.to(self.dtype)
        placed = whole = self._constrain(cast, entry.layout)
        if not self._is_dropless(name):  # whose kernel gathers it itself
            # gathered along the axes that split the tokens, which also places the reduction of its gradient: left to
            # itself the partitioner gathers the tokens of the whole batch where that seems shorter
            whole = self._without(self._token_axes(name, entry), entry.layout, placed)
        prepared = {name: whole}
        if partial is not None and partial.scatters:
            prepared[name + SUFFIX] = partial.leaf(placed)
        return prepared

    def _unpacked(self, name: str, codes: Tensor, scale: Tensor) -> Tensors:
        entry = self._entry(name)
        assert entry.packed is not None
        packing, weight, used = entry.packed.packing, entry.packed.weight, entry.packed.used
        if self._is_dropless(name):
            split = {axis for axis in used.layout if axis not in used.axes_of(0)}
        else:
            split = self._token_axes(name, used)
        # unpacked last, so that devices gather codes
        stored = ((entry, codes), (self._entry(name + SCALE), scale))
        codes, scale = (self._without(split, p.layout, self._constrain(part, p.layout)) for p, part in stored)
        if self._is_dropless(name):  # whose kernel unpacks them itself, a few at a time
            return {name: codes, name + SCALE: scale}
        return {name: self._without(split, used.layout, packing.unpack(codes, scale, weight, self.dtype, apart))}

    def _entry(self, name: str) -> ParameterPlan:
        return self.job.plan[first_name(name)]

    def _is_dropless(self, name: str) -> bool:
        return self.job.recipe.compute.experts == "dropless" and name.rpartition(".")[0] in self.experts_inside

    def _token_axes(self, name: str, entry: ParameterPlan) -> set[str]:
        return {*token_axes(name, entry, self.job.recipe, self.experts_inside), SEQUENCE}

    def _without(self, axes: Collection[str], layout: Layout, tensor: Tensor) -> Tensor:
        return self._constrain(tensor, {axis: place for axis, place in layout.items() if axis not in axes})

    def _as_stored(self, name: str, parameter: Tensor) -> Tensor:
        as_used = parameter.dtype in (self.dtype, torch.int8, torch.uint8)
        if parameter.dim() < 2 or not as_used or name.endswith(SUFFIX):
            return parameter
        sizes = self.mesh.shape()
        spec = partition_spec(self._entry(name).layout, parameter.dim(), tuple(sizes))
        manual = jax_call.Manual(tuple(sizes.items()), (spec,), (spec,), device_order(self.mesh))
        return as_stored(parameter, manual, self.job.stored[name].shape[0] if is_stacked(name) else 0)

    def _constrain(self, tensor: Tensor, layout: Layout) -> Tensor:
        return sharding.constrain(tensor, self.mesh, partition_spec(layout, tensor.dim(), tuple(self.mesh.shape())))
