"""The work of `shardwright.models.experts.dropless` on one device, in JAX: sort, multiply, combine.

Shape suffixes: as in `shardwright.models.experts.row_blocks`, but F and I are the widths of the first projection's
result and of the activation's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from shardwright.models.adapters.lora import A, B
from shardwright.models.adapters.packings.registry import SCALE
from shardwright.models.experts import activation, exchange, grouped_matmul
from shardwright.models.experts.exchange import Round
from shardwright.models.experts.row_blocks import Block, BlockPlan, SortedRows, in_order
from shardwright.models.experts.unpacking import PackedExperts, Unpacking
from shardwright.models.ops.collectives import exchange_sum
from shardwright.models.ops.device_kernels import kernels
from shardwright.models.ops.jax_call import Array, Axes, exchanges_beside, gathers_beside, jax, jnp, lax
from shardwright.models.ops.kernel_cost import is_fast
from shardwright.models.ops.stored_layout import ordered

Arrays = tuple[Array, ...]
# the kept results of the first projection, and perhaps of the activation, and the round that they are of
Kept = tuple[Arrays, Round]

# the sum of each parameter's gradients [E, …]; None for a parameter without one, or without one yet
Sums = Sequence[Array | None]

# With several rounds a block has room for 1/8 more rows than a balanced routing gives.
_SPARE = 8


@dataclass(frozen=True)
class ExpertShards:
    """A device's part of the experts, except its arrays; see also `shardwright.models.experts.dropless.Dropless`."""

    activation: activation.Activation
    names: tuple[str, ...]  # of the parameters: the two projections, biases, LoRA's factors, scales of packed ones
    out_first: bool  # weights are stored [E, F, H] and [E, H, I]; else [E, H, F] and [E, I, H]
    lora_scales: tuple[float, float]  # of each projection
    trained: tuple[bool, ...]  # whether a parameter has a gradient
    axes: Axes  # all of the mesh
    expert_axes: Axes
    expert_shards: int  # devices along the expert axes
    specs: tuple[tuple[Axes, ...], ...]  # the axes of each dimension of each parameter
    unpacking: tuple[Unpacking | None, ...]  # of each parameter that is packed
    widths: tuple[int, int]  # F and I
    buffer_bytes: int
    flops_a_byte: float
    keep: bool = False
    keep_all: bool = False

    def held(self, shards: Sequence[Array], kept: Mapping[int, Array]) -> list[Any]:
        """The parameters of the experts held here, from this device's shards and what the forward kept of the whole."""
        parameters: list[Any] = [kept[n] if n in kept else self.whole(n, shard) for n, shard in enumerate(shards)]
        for number, by in enumerate(self.unpacking):
            if by is not None:
                scale = self.names.index(self.names[number] + SCALE)
                parameters[number] = PackedExperts(shards[number], shards[scale], by)
        return parameters

    def whole(self, number: int, shard: Array) -> Array:
        """Gather parameter ``number`` of the experts held here from its shards, perhaps transposed (see `turned`)."""
        for dim, axes in self._gathered(self.specs[number]):
            for axis in reversed(axes):  # one at a time: over a whole torus at once libtpu would run an all-reduce
                shard = lax.all_gather(shard, axis, axis=dim, tiled=True)
        return shard.swapaxes(1, 2) if self.turned(number) else shard

    def reduced(self, number: int, gradient: Array, dtype: Any) -> Array:
        """Sum the devices' gradients of parameter ``number``, into the parameter's own layout and ``dtype``."""
        gradient, turned, spec = gradient.astype(dtype), self.turned(number), self.specs[number]
        narrow = self.names[number].endswith((A, B))
        if turned and not narrow:
            # scattered along the minor dimension it would be copied first, and libtpu may run an all-reduce
            gradient = grouped_matmul.row_major(gradient)
        for dim, axes in reversed(self._gathered(spec)):
            dim = 3 - dim if turned else dim
            if gathers_beside() and exchanges_beside() and gradient.ndim > 2:  # a weight's, not a bias's
                gradient = exchange_sum(gradient, axes, dim)
                continue
            for axis in axes:
                gradient = lax.psum_scatter(gradient, axis, scatter_dimension=dim, tiled=True)
        if turned and narrow:
            gradient = gradient.swapaxes(1, 2)
        elif turned:
            # or the optimizer's state, the gradient's next reader, would be copied into its layout and back
            gradient = grouped_matmul.row_major(gradient).swapaxes(1, 2)
            gradient = grouped_matmul.row_major(gradient)
        split = {axis for axes in spec for axis in axes} | set(self.expert_axes)
        rest = tuple(axis for axis in self.axes if axis not in split)
        gradient = lax.psum(gradient, rest) if rest else gradient
        # a factor is narrow: in the default order its few columns would be padded to a tile's
        return ordered(gradient) if narrow else gradient

    def turned(self, number: int) -> bool:
        """True if `whole` swaps a weight's last two dimensions: they lie so, or the last alone is gathered.

        Of a factor the rank never comes last: a kernel's operand would be padded to a tile's columns, with the factors
        of all layers copied so before a loop.
        """
        if self.names[number].endswith((A, B)):
            return self.names[number].endswith(B)
        # a TPU lays the result of such a gather out with the other dimension as the minor one: a kernel that expects
        # the last there would begin with a transposed copy
        by = self.unpacking[number]
        return (by is not None and by.turned) or [dim for dim, _ in self._gathered(self.specs[number])] == [2]

    def contract_last(self, number: int) -> bool:
        """Whether `whole` gives weight ``number`` as [E, out, in]; else as [E, in, out]."""
        out_first = self.out_first or self.names[number].endswith((A, B))
        return out_first != self.turned(number)

    def _gathered(self, spec: tuple[Axes, ...]) -> list[tuple[int, Axes]]:
        """(dimension, axes) of each dimension that `whole` gathers."""
        axes = [tuple(axis for axis in a if axis not in self.expert_axes) for a in spec]
        return [(dim, a) for dim, a in enumerate(axes) if a]

    def plan(self, tokens: int, top_k: int, experts: int, hidden_bytes: int, first_bytes: int) -> BlockPlan:
        """Plan the crossing of a device's tokens to its ``experts``, and how many rows are multiplied at once.

        The bytes are those of a row of hidden width and of the first projection's.
        """
        fit = self.buffer_bytes // first_bytes
        crossing = self._crossing(tokens, top_k, experts, self.buffer_bytes // hidden_bytes // top_k, fit)
        rows = crossing.rows * top_k
        balanced = crossing.window * top_k if self.expert_axes else rows
        tiles = grouped_matmul.tiles_for(min(balanced, max(fit, 1)), experts, self.flops_a_byte)
        tile = tiles.rows
        more = balanced + balanced // _SPARE
        if crossing.slots is not None and crossing.rounds == 1:
            more = exchange.random_pairs(balanced, top_k, self.expert_shards)
        expected = min(more, rows) if self.expert_axes else rows
        # more rows than expected take more blocks, or more rounds where one is planned
        blocks = -(-expected // max(fit // tile * tile, tile))
        block = -(-expected // (blocks * tile)) * tile
        at_once = blocks == 1 and crossing.rounds == 1 and (crossing.slots is not None or block >= rows)
        rest = None
        if at_once and crossing.slots is not None:
            rest = self._one_block(exchange.plan_rest(crossing, top_k, self.expert_shards), top_k, experts)
            crossing = replace(crossing, pairs=block // self.expert_shards, rest=rest.crossing)
        return BlockPlan(crossing, block, tiles, at_once, room=block * blocks if self.keep else 0, rest=rest)

    def _one_block(self, crossing: exchange.ExchangePlan, top_k: int, experts: int) -> BlockPlan:
        balanced = crossing.window * top_k
        tiles = grouped_matmul.tiles_for(balanced, experts, self.flops_a_byte)
        block = -(-exchange.random_pairs(balanced, top_k, self.expert_shards) // tiles.rows) * tiles.rows
        return BlockPlan(replace(crossing, pairs=block // self.expert_shards), block, tiles, at_once=True)

    def _crossing(self, tokens: int, top_k: int, experts: int, most: int, fit: int) -> exchange.ExchangePlan:
        """Plan the crossing where a device holds ``most`` tokens of a round, and ``fit`` rows of the first result."""
        shards, fast = self.expert_shards, is_fast(self.flops_a_byte)
        if fast and shards > 1:
            most = min(most, fit * shards // top_k * 15 // 16)
        plan = partial(exchange.plan, tokens, top_k, shards, experts, max(most, 1))
        crossing = plan(overlaps=False)
        one = crossing.slots is not None and exchange.random_pairs(tokens * top_k, top_k, shards) <= fit
        # Several rounds each read and write the sums of all gradients. They pay where there would be several blocks
        # anyway; but a bandwidth-limited chip gets the fewest rounds that leave each one block.
        return plan(overlaps=True) if exchanges_beside() and not fast and not one else crossing

    def kept(self, planned: BlockPlan, hidden: int) -> list[tuple[int, int]]:
        """The shapes of a device's saved arrays: received tokens [R, hidden], if they cross, and values of rows."""
        rounds = planned.crossing.rounds
        came = [(rounds * planned.crossing.rows, hidden)] if self.expert_shards > 1 else []
        widths = self.widths if self.keep_all else self.widths[:1]
        return [*came, *((rounds * planned.room, width) for width in widths)] if self.keep else []

    def came_and_made(self, kept: Sequence[Array]) -> tuple[Arrays, Arrays]:
        """Split saved arrays into received tokens, if they cross, and values of their rows."""
        crosses = int(self.expert_shards > 1)
        return tuple(kept[:crosses]), tuple(kept[crosses:])

    def kept_weights(self) -> list[int]:
        """The numbers of the parameters that a device's forward keeps as `whole` gives them."""
        return [n for n, spec in enumerate(self.specs) if self.keep_all and self._gathered(spec)]

    def whole_shape(self, number: int, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that `whole` gives parameter ``number``, which is of ``shape`` on all devices together."""
        experts, *widths = shape
        return (experts // self.expert_shards, *(reversed(widths) if self.turned(number) else widths))


def forward(x_TH: Array, index_Tk: Array, weight_Tk: Array, held: Array, *shards: Array, local: ExpertShards) -> Any:
    """Return the experts' output for this device's tokens, [T, H], from ``held``, the numbers [E] of its experts.

    With ``local.keep`` also the arrays of :meth:`ExpertShards.kept`, and the :meth:`ExpertShards.kept_weights`.
    """
    parameters = local.held(shards, {})
    planned = _plan(x_TH, index_Tk, held, local)
    if planned.at_once and not gathers_beside():
        # libtpu runs a gather alone if only kernels could overlap with it, as behind the first product, or if tokens
        # cross at the same time
        if planned.rest is None:
            parameters = lax.optimization_barrier(parameters)
        else:
            x_TH, parameters = lax.optimization_barrier((x_TH, parameters))
    projections = _projections(parameters, local, planned)

    def compute(kept: Arrays, tokens: Arrays, round_: Round | None) -> tuple[Any, tuple[Array]]:
        x, index, weight = tokens
        rows = in_order(index, held, planned.of(round_), not local.expert_axes)
        if round_ is None or not kept:
            y, _ = _experts(x, rows, projections, None)
        else:
            came, made = local.came_and_made(kept)
            y, made = _experts(x, rows, projections, (made, round_))
            kept = (*(round_.put(c, x) for c in came), *made)
        return kept, (rows.combine(y, weight).astype(x.dtype),)

    room = tuple(kernels().unwritten(shape, x_TH.dtype, held) for shape in local.kept(planned, x_TH.shape[1]))
    tensors, axes = (x_TH, index_Tk, weight_Tk), (local.expert_axes, local.axes)
    kept, (y_TH,) = exchange.in_rounds(compute, room, tensors, (x_TH,), held, planned.crossing, axes)
    return (y_TH, *kept, *(parameters[number] for number in local.kept_weights())) if local.keep else y_TH


def backward(
    grad_TH: Array, x_TH: Array, index_Tk: Array, weight_Tk: Array, held: Array, *given: Array, local: ExpertShards
) -> Arrays:
    """Return the gradients of the tokens, of the routing weights and of each trained parameter."""
    # this device's shard of each parameter, and what the forward kept: values of rows, and whole parameters
    weights = local.kept_weights()
    shards, kept = given[: len(local.names)], given[len(local.names) : len(given) - len(weights)]
    whole = dict(zip(weights, given[len(given) - len(weights) :], strict=True))
    parameters = local.held(shards, whole)
    planned = _plan(x_TH, index_Tk, held, local)
    if planned.rest is not None and not gathers_beside():
        grad_TH, x_TH, parameters = lax.optimization_barrier((grad_TH, x_TH, parameters))
    projections = _projections(parameters, local, planned)
    # a frozen parameter has neither sum nor result; a sum that is complete at once needs no zeros to be added to
    summed = [trained and not planned.at_once for trained in local.trained]
    zeros = [jnp.zeros(p.shape, jnp.float32) if add else None for p, add in zip(parameters, summed, strict=True)]

    def compute(sums: Sums, tokens: Arrays, round_: Round | None) -> tuple[Sums, tuple[Array, Array]]:
        grad, x, index, weight = tokens
        rows = in_order(index, held, planned.of(round_), not local.expert_axes)
        given = None if round_ is None or not kept else (made, round_)
        (grad_rows, grad_weights), sums = _experts_backward((grad, x, weight), rows, projections, sums, given)
        grad_x = rows.combine(grad_rows).astype(x.dtype)
        return sums, (grad_x, rows.of_choices(grad_weights).astype(weight.dtype))

    tensors, like = (grad_TH, x_TH, index_Tk, weight_Tk), (x_TH, weight_Tk)
    axes = (local.expert_axes, local.axes)
    came, made = local.came_and_made(kept)
    sums, (grad_x, grad_weight) = exchange.in_rounds(compute, zeros, tensors, like, held, planned.crossing, axes, *came)
    gradients = [
        local.reduced(n, g, p.dtype) for n, (g, p) in enumerate(zip(sums, shards, strict=True)) if g is not None
    ]
    return grad_x, grad_weight, *gradients


def _plan(x_TH: Array, index_Tk: Array, held: Array, local: ExpertShards) -> BlockPlan:
    (tokens, top_k), itemsize = index_Tk.shape, x_TH.dtype.itemsize
    return local.plan(tokens, top_k, len(held), x_TH.shape[1] * itemsize, local.widths[0] * itemsize)


class _Projection:
    """Projection ``number`` (0 or 1) of an expert: its weight, and its bias and LoRA factors, if any."""

    def __init__(self, parameters: Sequence[Any], local: ExpertShards, number: int) -> None:
        self.parameters, self.local, self.number = parameters, local, number
        self.dtype = parameters[number].dtype
        numbers = {name: n for n, name in enumerate(local.names)}
        self.bias, self.a, self.b = (numbers.get(local.names[number] + suffix) for suffix in ("_bias", A, B))

    def forward(self, block: Block, x_B: Array) -> Array:
        y_B = self._times(block, x_B, self.number)
        if self.a is not None:
            y_B += self._scaled(self._times(block, self._times(block, x_B, self.a), self.b))
        return y_B if self.bias is None else y_B + block.bias(self.parameters[self.bias])

    def back(self, block: Block, grad_B: Array) -> Array:
        grad_x = self._times(block, grad_B, self.number, back=True)
        if self.a is None:
            return grad_x
        return grad_x + self._times(block, self._low(block, grad_B), self.a, back=True)

    def add_gradients(self, block: Block, sums: list[Any], grad_B: Array, x_B: Array) -> None:
        """Add these rows' part of the trained parameters' gradients to ``sums``, in place."""
        self._add(block, sums, self.number, grad_B, x_B)
        if self.bias is not None and self.local.trained[self.bias]:
            sums[self.bias] = block.add_rows(sums[self.bias], grad_B)
        if self.a is not None:
            self._add(block, sums, self.b, self._scaled(grad_B), self._times(block, x_B, self.a))
            self._add(block, sums, self.a, self._low(block, grad_B), x_B)

    def _low(self, block: Block, grad_B: Array) -> Array:  # the gradient of the value between the factors
        return self._times(block, self._scaled(grad_B), self.b, back=True)

    def _scaled(self, x_B: Array) -> Array:
        return x_B * jnp.asarray(self.local.lora_scales[self.number], x_B.dtype)

    def _times(self, block: Block, x_B: Array, number: Any, *, back: bool = False) -> Array:
        last = self.local.contract_last(number) != back
        return block.multiply(x_B, self.parameters[number], contract_last=last)

    def _add(self, block: Block, sums: list[Any], number: Any, out_B: Array, in_B: Array) -> None:
        if self.local.trained[number]:
            sums[number] = block.outer(sums[number], out_B, in_B, contract_last=self.local.contract_last(number))


def _projections(parameters: Sequence[Any], local: ExpertShards, planned: BlockPlan) -> tuple[_Projection, _Projection]:
    if not planned.at_once:
        # each round or block would unpack them again: for 0.2 GiB less, DeepSeek-V3's LoRA in 8 rounds on v5p is 8 %
        # slower by the estimate, and in 4 on v6e as fast, for 0.7 (docs/records/tpu/adapters.md)
        parameters = [p.whole() if isinstance(p, PackedExperts) else p for p in parameters]
    return _Projection(parameters, local, 0), _Projection(parameters, local, 1)


def _experts(
    x_TH: Array, rows: SortedRows, projections: tuple[_Projection, _Projection], kept: Kept | None
) -> tuple[Array, Arrays]:
    """The held experts' output for their rows, [R, H], and the rooms of ``kept``, which are room for values of rows."""
    first, second = projections
    dtype = first.dtype

    def body(block: Block, carry: tuple[Array, Arrays]) -> tuple[Array, Arrays]:
        y_RH, rooms = carry
        h_BF = first.forward(block, block.gather(x_TH).astype(dtype))
        a_BI = first.local.activation(h_BF)
        if kept is not None:
            rooms = tuple(block.keep(room, made, kept[1]) for room, made in zip(rooms, (h_BF, a_BI), strict=False))
        return block.put(y_RH, second.forward(block, a_BI)), rooms

    y_RH = kernels().unwritten((len(rows.token_R), x_TH.shape[1]), dtype, rows.end_E)
    return rows.fold(body, (y_RH, () if kept is None else kept[0]))


def _experts_backward(
    tokens: tuple[Array, Array, Array],  # the output's gradients, tokens and weights
    rows: SortedRows,
    projections: tuple[_Projection, _Projection],
    sums: Sums,
    kept: Kept | None,
) -> tuple[tuple[Array, Array], Sums]:
    """The gradients of each row's token [R, H] and routing weight [R], and ``sums`` with the parameters' added."""
    (grad_TH, x_TH, weight_Tk), (first, second) = tokens, projections
    dtype, activate = first.dtype, first.local.activation
    weight_N = weight_Tk.T.reshape(-1)

    def made(number: int, block: Block, make: Callable[[Array], Array], given: Array) -> Array:
        if kept is None or number >= len(kept[0]):
            return make(given)
        return block.kept(kept[0][number], kept[1], make, given)

    def body(block: Block, carry: tuple[tuple[Array, Array], Sums]) -> tuple[tuple[Array, Array], Sums]:
        (grad_rows, grad_row_weights), sums = carry
        weight_B1 = block.weights(weight_N)[:, None]
        x_BH, grad_BH = (block.gather(t).astype(dtype) for t in (x_TH, grad_TH))
        h_BF = made(0, block, partial(first.forward, block), x_BH)
        a_BI = made(1, block, activate, h_BF)
        new = list(sums)
        second.add_gradients(block, new, _scale(grad_BH, weight_B1), a_BI)
        (grad_BH, a_BI), new = _after((grad_BH, a_BI), new)
        # the gradient of the activation's result, before it is multiplied by the routing weight
        grad_BI = second.back(block, grad_BH)
        grad_weight_B = _row_products(grad_BI, a_BI)
        if second.bias is not None:
            grad_weight_B += _row_products(grad_BH, block.bias(second.parameters[second.bias]))
        # the barrier makes the compiler compute the activation again: otherwise it keeps the two computations' common
        # values, several float32 arrays of the first projection's width
        _, back = jax.vjp(activate, lax.optimization_barrier(h_BF))
        (grad_BF,) = back(_scale(grad_BI, weight_B1))
        first.add_gradients(block, new, grad_BF, x_BH)
        grad_BF, new = _after(grad_BF, new)
        grad_rows = block.put(grad_rows, first.back(block, grad_BF))
        return (grad_rows, block.put(grad_row_weights, grad_weight_B)), new

    R = len(rows.token_R)
    grad_rows = kernels().unwritten((R, x_TH.shape[1]), dtype, rows.end_E)
    return rows.fold(body, ((grad_rows, jnp.zeros(R, jnp.float32)), sums))


def _after(x: Any, gradients: Any) -> Any:
    """Order computations from ``x`` after the weights' ``gradients``; return both."""
    # Until then weights cross beside compute, and from then on the gradients' sums over devices. The compiler itself
    # would put the products that make gradients last, and nothing beside the sums.
    return lax.optimization_barrier((x, gradients)) if gathers_beside() else (x, gradients)


def _row_products(a_BI: Array, b_BI: Array) -> Array:
    return (a_BI.astype(jnp.float32) * b_BI.astype(jnp.float32)).sum(1)


def _scale(x_BI: Array, weight_B1: Array) -> Array:
    return (x_BI.astype(jnp.float32) * weight_B1.astype(jnp.float32)).astype(x_BI.dtype)
