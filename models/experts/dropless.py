"""Experts that drop no token: exact for any routing, with static shapes and no work for rows that don't exist.

Each device sorts its (token, choice) pairs by expert, multiplies the sorted rows by their experts' weights
(`shardwright.models.experts.grouped_matmul`) and gathers every token's k results. Activations move only by gathers, in
the backward too. Communication is explicit (`jax.shard_map`), not left to the partitioner:

- Weights are gathered from their layout just before use, except over the axes that split the experts. Their gradients
  are reduce-scattered to that layout. A frozen weight has no gradient, and no product is made for one.
- Over the axes that split the experts, tokens cross in rounds (`shardwright.models.experts.exchange`). Each device sums
  its experts' outputs for a token, and sends the sum back. So the largest buffer is a round's, whatever the routing: if
  all tokens want one expert, its device takes longer and holds no more.

The forward saves only its inputs, and the backward computes the first projection again. With ``keep`` it saves that
projection's result, and the tokens received from other devices, which are then not sent again: a balanced routing's
rows and some more, for which there is room. The second projection is not computed again for the router's gradient: that
is the product of an expert's output with the output's gradient, and equals the product of the second projection's input
with the gradient taken back through it.

Shape suffixes: T tokens, H hidden width, k experts a token.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from shardwright.models.adapters.lora import SCALE, A, B
from shardwright.models.adapters.packings import registry as packings
from shardwright.models.experts import activation, dropless_rows
from shardwright.models.experts.dropless_rows import ExpertShards
from shardwright.models.experts.routing import count
from shardwright.models.experts.unpacking import Unpacking
from shardwright.models.ops.collectives import rings
from shardwright.models.ops.jax_call import Axes, Manual, Spec, jax_call
from shardwright.models.ops.operation import kernel

# the attribute of an experts module that holds its activation, traced
_ACTIVATION = "_shardwright_activation"


@dataclass(frozen=True)
class Dropless:
    """The dropless experts function under one layout, called like `shardwright.models.experts.capacity.Capacity`."""

    axes: tuple[tuple[str, int], ...] = ()  # as in `Manual`, and so is the order; none: one device
    batch_axes: Axes = ()  # they split tokens outside; inside all axes do, so no two devices do the same work
    expert_axes: Axes = ()  # they split dimension 0 of every parameter; tokens cross them, and weights don't
    weight_specs: Mapping[str, Spec] = field(default_factory=dict)  # by parameter's name; replicated if not named
    order: tuple[int, ...] | None = None
    # bound on a round's rows of hidden width, and on a block's rows of the first projection's width
    # (`shardwright.models.ops.kernel_cost.buffer_bytes`); a few such buffers exist at once
    buffer_bytes: int = 2**31
    keep: bool = False  # save the first projection's result for the backward, instead of computing it again
    keep_all: bool = False  # also save the activation's result, and gathered weights
    flops_a_byte: float = 0.0  # a chip's, between HBM and VMEM: they decide how large tiles and rounds are; 0: unknown
    # weights that may be packed: how, their shape in a layer, and their unpacking for so many experts of a device
    packed: Mapping[str, tuple[tuple[int, ...], Callable[[int], Unpacking]]] = field(default_factory=dict)

    def __call__(self, experts: Any, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        """Map tokens [T, H] with expert indices and routing weights [T, k] to [T, H], in the tokens' dtype.

        Raises:
            ValueError: the devices don't divide the tokens, or the layout or the experts module is not supported.
        """
        devices = math.prod(size for _, size in self.axes)
        if len(x_TH) % devices:
            raise ValueError(f"{len(x_TH)} tokens over {devices} devices: dropless experts need a multiple of them")
        count(experts, index_Tk)
        names = _parameter_names(experts)
        packed = {name: self.packed[name] for name in names if hasattr(experts, name + packings.SCALE)}
        names += [name + packings.SCALE for name in packed]
        parameters = [getattr(experts, name) for name in names]
        specs = tuple(self._spec(name, p.dim()) for name, p in zip(names, parameters, strict=True))
        weights = (packed[name][0] if name in packed else getattr(experts, name).shape for name in names[:2])
        first, second = (shape[:0:-1] if experts.is_transposed else shape[1:] for shape in weights)
        sizes, widths = dict(self.axes), (first[0], second[1])
        expert_shards = math.prod(sizes[axis] for axis in self.expert_axes)
        held = len(parameters[0]) // expert_shards
        local = ExpertShards(
            activation=_activation(experts, widths[0]),
            names=tuple(names),
            out_first=not experts.is_transposed,
            lora_scales=(getattr(experts, names[0] + SCALE, (0.0,))[0], getattr(experts, names[1] + SCALE, (0.0,))[0]),
            trained=tuple(p.requires_grad for p in parameters),
            axes=tuple(sizes),
            expert_axes=self.expert_axes,
            expert_shards=expert_shards,
            specs=specs,
            unpacking=tuple(packed[name][1](held) if name in packed else None for name in names),
            widths=widths,
            buffer_bytes=self.buffer_bytes,
            flops_a_byte=self.flops_a_byte,
            keep=self.keep,
            keep_all=self.keep and self.keep_all,
        )
        bytes_a_row = (x_TH.element_size() * width for width in (x_TH.shape[1], widths[0]))
        planned = local.plan(len(x_TH) // devices, index_Tk.shape[1], held, *bytes_a_row)
        whole = [local.whole_shape(number, parameters[number].shape) for number in local.kept_weights()]
        shapes = (*local.kept(planned, x_TH.shape[1]), *whole)
        kept = tuple((rows * devices, *others) for rows, *others in shapes)
        manuals = self._manuals(specs, local, kept) if self.axes else None
        return _dropless([x_TH, index_Tk, weight_Tk, *parameters], local, manuals, kept)[0]

    def in_rings(self, longest: int) -> Dropless:
        """Split the axes along which weights are gathered into rings of at most ``longest`` devices."""
        cut = {name: {name: n} if name in self.expert_axes else rings(name, n, longest) for name, n in self.axes}

        def inside(entry: str | Axes | None) -> Axes:
            return tuple(ring for name in _axes_of(entry) for ring in cut[name])

        return replace(
            self,
            axes=tuple(pair for sizes in cut.values() for pair in sizes.items()),
            batch_axes=inside(self.batch_axes),
            weight_specs={name: tuple(map(inside, spec)) for name, spec in self.weight_specs.items()},
        )

    def _spec(self, name: str, rank: int) -> tuple[Axes, ...]:
        """The axes of each dimension of a parameter, with the expert axes moved to dimension 0."""
        spec = self.weight_specs.get(name, (None,) * rank)
        axes = [_axes_of(entry) for entry in spec]
        if len(axes) != rank:
            raise ValueError(f"a partition spec of {len(axes)} entries for {name}, which has {rank} dimensions")
        if axes[0] != self.expert_axes and set(axes[0]) & set(self.expert_axes):
            raise ValueError(f"{name} has experts split over {axes[0]}: expert_axes must be all of these or none")
        others = [tuple(axis for axis in a if axis not in self.expert_axes) for a in axes]
        return (self.expert_axes + others[0], *others[1:])

    def _manuals(
        self, specs: Sequence[tuple[Axes, ...]], local: ExpertShards, shapes: Sequence[tuple[int, ...]]
    ) -> tuple[Manual, Manual]:
        rest = tuple(axis for axis, _ in self.axes if axis not in self.batch_axes)
        tokens: Spec = (self.batch_axes + rest, None)
        held: Spec = (self.expert_axes or None,)
        weights = [tuple(a or None for a in spec) for spec in specs]
        trained = [spec for spec, learns in zip(weights, local.trained, strict=True) if learns]
        kept: list[Spec] = [(tokens[0], *[None] * (len(shape) - 1)) for shape in shapes]
        inputs = (tokens, tokens, tokens, held, *weights)
        backward = Manual(self.axes, (tokens, *inputs, *kept), (tokens, tokens, *trained), self.order)
        return Manual(self.axes, inputs, (tokens, *kept), self.order), backward


def _axes_of(entry: str | Axes | None) -> Axes:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def _parameter_names(experts: Any) -> list[str]:
    if experts.has_post_expert_norm:
        raise ValueError(f"dropless experts know no norm after an expert, which {type(experts).__name__} has")
    names = ["gate_up_proj" if experts.has_gate else "up_proj", "down_proj"]
    biases = [f"{name}_bias" for name in names] if experts.has_bias else []
    return names + biases + [name + suffix for name in names for suffix in (A, B) if hasattr(experts, name + suffix)]


def _activation(experts: Any, width: int) -> activation.Activation:
    """The module's activation of rows of ``width``; traced once, and kept on the module."""
    traced = getattr(experts, _ACTIVATION, None)
    if traced is None:
        # semi-private: `_apply_gate` of transformers/integrations/moe.py, transformers 5.23
        traced = activation.trace(experts._apply_gate if experts.has_gate else experts.act_fn, width)
        setattr(experts, _ACTIVATION, traced)
    return traced


# the layouts of the forward and of the backward; None: one device
Manuals = tuple[Manual, Manual] | None
# of the forward's saved arrays, with the devices' shares one after another
KeptShapes = tuple[tuple[int, ...], ...]


def _like(tensors: Sequence[Tensor], local: ExpertShards, manuals: Manuals, kept: KeptShapes) -> list[Tensor]:
    x_TH, _, _, *parameters = tensors
    weights = [parameters[number] for number in local.kept_weights()]
    like = [*[x_TH] * (len(kept) - len(weights)), *weights]
    return [x_TH.new_empty(x_TH.shape), *(t.new_empty(shape) for t, shape in zip(like, kept, strict=True))]


def _gradients(
    grads: Sequence[Tensor], saved: Sequence[Tensor], local: ExpertShards, manuals: Manuals, kept: KeptShapes
) -> list[Tensor | None]:
    grad_x, grad_weight, *found = _dropless_backward([grads[0], *saved], local, manuals)
    gradients = iter(found)
    return [grad_x, None, grad_weight, *(next(gradients) if learns else None for learns in local.trained)]


@kernel(
    "dropless",
    _like,
    _gradients,
    saved=lambda tensors, results: [*tensors, *results[1:]],
    # the first projection's, by which the remat policies choose the values to keep
    flops=lambda shapes, local, *_: 2 * math.prod(shapes[1]) * shapes[0][1] * local.widths[0],
)
def _dropless(tensors: Sequence[Tensor], local: ExpertShards, manuals: Manuals, kept: KeptShapes) -> list[Tensor]:
    """Map tokens, indices, weights and parameters to the output and the arrays of shapes ``kept`` for the backward."""
    return _run(dropless_rows.forward, tensors, 3, local, manuals and manuals[0])


def _backward_like(tensors: Sequence[Tensor], local: ExpertShards, manuals: Manuals) -> list[Tensor]:
    _, x_TH, _, weight_Tk, *parameters = tensors
    return [t.new_empty(t.shape) for t in (x_TH, weight_Tk, *itertools.compress(parameters, local.trained))]


@kernel("dropless_backward", _backward_like)
def _dropless_backward(tensors: Sequence[Tensor], local: ExpertShards, manuals: Manuals) -> list[Tensor]:
    """Map the output's gradient, the forward's tensors and its saved arrays to the gradients of all that have one."""
    return _run(dropless_rows.backward, tensors, 4, local, manuals and manuals[1])


def _run(
    function: Callable[..., Any], tensors: Sequence[Tensor], tokens: int, local: ExpertShards, manual: Manual | None
) -> list[Tensor]:
    """Run ``function`` on ``tensors``, of which the first are ``tokens`` tensors of tokens."""
    device = tensors[0].device
    if device.type != "xla":
        raise ValueError(f"dropless experts run on XLA devices, and these tokens are on {device}")
    # tells a device which experts it holds: its position in the mesh does not follow from its id
    experts = torch.arange(len(tensors[tokens]), dtype=torch.int32, device=device)
    return jax_call(function, *tensors[:tokens], experts, *tensors[tokens:], manual=manual, local=local)
