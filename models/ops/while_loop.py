"""A loop over the first dimension of tensors, as one operation of the step's graph.

It is torch_xla's `scan` without autograd, with a cache of lowered loops: a step that runs a loop again neither traces
nor lowers its body.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# semi-private: torch_xla/core/xla_builder.py and `LoweringContext` of torch_xla/csrc/init_python_bindings.cpp,
# torch_xla 2.9
import torch_xla
import torch_xla.core.xla_builder as xb
from torch import Tensor

# semi-private: torch/utils/_pytree.py, torch 2.9
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

Flat = list[Tensor]
# (carry, x) -> (carry, y)
Step = Callable[[Any, Any], tuple[Any, Any]]
# the structure of a tree, and which of its leaves are tensors (the others are None)
Spec = tuple[TreeSpec, tuple[bool, ...]]
# lowered loops, by the shapes of their inputs
Known = dict[str, "Loop"]


def run_turns(turn: Step, carry: Any, xs: Any, *, reverse: bool = False, known: Known | None = None) -> tuple[Any, Any]:
    """Return ``carry`` after ``carry, y = turn(carry, x)`` for each slice x of ``xs``, and the stack of all y.

    All are trees of tensors and None. No gradient flows through. With ``reverse`` the last slice is first; y keep the
    order of ``xs``. A turn with a cache of its loops, ``known``, must compute the same from the same shapes in every
    step, and use nothing but its arguments. Draws from the device's own generator would repeat in every turn.
    """
    (given, carry_spec), (parts, xs_spec) = _flat(carry), _flat(xs)
    key = str((carry_spec, xs_spec, reverse, [(tuple(t.shape), t.dtype) for t in (*given, *parts)]))
    loop = None if known is None else known.get(key)
    if loop is None:
        loop = _lowered(_traced(turn, (given, carry_spec), (parts, xs_spec)), given, parts, reverse)
        if known is not None and loop.turn.closed:
            known[key] = loop
    return loop(given, parts)


@dataclass(frozen=True)
class LoweredTurn:
    """A lowered turn."""

    computation: Any  # of the inputs that it uses: of the carry, a slice of each of ``xs``, and the hoisted tensors
    order: list[int]  # the places of these among all inputs
    hoisted: Flat  # tensors that the turn uses beside its arguments, such as the numbers in its formulas
    closed: bool  # whether all of these are numbers, and none is the random seed
    results: list[tuple[torch.Size, torch.dtype]]  # of each y
    specs: tuple[Spec, Spec]  # of the returned carry and of y


@dataclass(frozen=True)
class Loop:
    """A lowered loop of ``count`` turns, of the inputs that :func:`_arguments` gives."""

    computation: Any
    turn: LoweredTurn
    count: int

    def __call__(self, carry: Flat, parts: Flat) -> tuple[Any, Any]:
        given = _arguments(self.turn, self.count, carry, parts)
        out = torch_xla._XLAC._xla_user_computation("xla::scan", given, self.computation)
        _, after, _, stacks, _ = _split(out, self.turn, len(carry), len(parts))
        of_carry, of_results = self.turn.specs
        return _tree(after, of_carry), _tree(stacks, of_results)


def _arguments(turn: LoweredTurn, count: int, carry: Flat, parts: Flat) -> Flat:
    device = torch_xla.device()
    stacks = [torch.zeros((count, *shape), dtype=dtype, device=device) for shape, dtype in turn.results]
    return [torch.tensor(0, device=device), *carry, *parts, *stacks, *turn.hoisted]


def _traced(turn: Step, carry: tuple[Flat, Spec], xs: tuple[Flat, Spec]) -> LoweredTurn:
    given = len(carry[0])
    inputs = [xb.create_placeholder_tensor(t.shape, t.dtype) for t in carry[0]]
    inputs += [xb.create_placeholder_tensor(t.shape[1:], t.dtype) for t in xs[0]]
    # an annotation on a placeholder itself would put another tensor in its place (pytorch/xla#8742)
    mine = [t * 1 for t in inputs]
    after, results = turn(_tree(mine[:given], carry[1]), _tree(mine[given:], xs[1]))
    (next_carry, of_carry), (ys, of_results) = _flat(after), _flat(results)
    shapes = [[tuple(t.shape) for t in tensors] for tensors in (carry[0], next_carry)]
    if shapes[0] != shapes[1]:
        raise ValueError(f"a turn is given a carry of {shapes[0]} and returns one of {shapes[1]}")
    made = [*next_carry, *ys]
    draws = torch_xla._XLAC._get_seed_info_id() in torch_xla._XLAC._get_tensors_xla_device_data_node(made)[0]
    context = torch_xla._XLAC.lowering.LoweringContext("turn")
    context.build(made)
    numbers = [context.tensor_parameter_id(t) for t in inputs]  # -1: it is not used
    hoisted = {k: t for k, t in context.device_parameter_id_tensor_mapping().items() if k not in numbers}
    order = [place for k, place in sorted((k, place) for place, k in enumerate((*numbers, *hoisted))) if k >= 0]
    computation = xb.computation_from_module_proto("turn", context.hlo())
    closed = not draws and all(t.dim() == 0 for t in hoisted.values())
    shapes_of_y = [(t.shape, t.dtype) for t in ys]
    return LoweredTurn(computation, order, [*hoisted.values()], closed, shapes_of_y, (of_carry, of_results))


def _lowered(turn: LoweredTurn, carry: Flat, parts: Flat, reverse: bool) -> Loop:
    count = len(parts[0])

    def number_of(builder: Any, value: int) -> Any:
        return xb.Op.scalar(builder, value, dtype=xb.Type.S64)

    def more(number: Any, *_: Any) -> Any:
        return number < number_of(number.builder(), count)

    def body(*state: Any) -> Any:
        (number,), mine, slices, stacks, hoisted = _split(state, turn, len(carry), len(parts))
        at = number_of(number.builder(), count - 1) - number if reverse else number
        inputs = [*mine, *(_slice(part, at) for part in slices), *hoisted]
        made = xb.Op.call(turn.computation, [inputs[place] for place in turn.order])
        after = [made.get_tuple_element(k) for k in range(len(mine))]
        stacks = [_put(stack, made.get_tuple_element(len(mine) + k), at) for k, stack in enumerate(stacks)]
        return (number + number_of(number.builder(), 1), *after, *slices, *stacks, *hoisted)

    builder = xb.create_builder("scan")
    shapes = [xb.tensor_shape(t) for t in _arguments(turn, count, carry, parts)]
    state = [xb.mkparam(builder, k, shape) for k, shape in enumerate(shapes)]
    return Loop(xb.Op.mkwhile(state, more, body).build("scan"), turn, count)


def _split(state: Sequence[Any], turn: LoweredTurn, carry: int, parts: int) -> list[list[Any]]:
    """Split a loop's state into the turn's number, the carry, ``xs``, the stacks, and the hoisted tensors."""
    given = iter(state)
    sizes = (1, carry, parts, len(turn.results), len(turn.hoisted))
    return [[next(given) for _ in range(size)] for size in sizes]


def _slice(stack: Any, at: Any) -> Any:
    _, *shape = stack.shape().sizes
    return stack.dynamic_slice([at, *(at.zeros_like() for _ in shape)], [1, *shape]).reshape(shape)


def _put(stack: Any, value: Any, at: Any) -> Any:
    start = [at, *(at.zeros_like() for _ in value.shape().sizes)]
    return stack.dynamic_update_slice(value.broadcast([1]), start)


def _flat(tree: Any) -> tuple[Flat, Spec]:
    leaves, spec = tree_flatten(tree)
    return [t for t in leaves if t is not None], (spec, tuple(t is not None for t in leaves))


def _tree(flat: Sequence[Tensor], spec: Spec) -> Any:
    tensors = iter(flat)
    return tree_unflatten([next(tensors) if there else None for there in spec[1]], spec[0])
