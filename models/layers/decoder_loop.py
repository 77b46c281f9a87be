"""The inputs and outputs of a decoder's layers, recorded by running the decoder once on meta."""

import copy
import functools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

# semi-private: torch/utils/_pytree.py, torch 2.9
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

from shardwright.models.attention.attention_interface import masks_without_reads
from shardwright.models.layers import layer_inputs  # noqa: F401  # the mappings that it registers are flattened here
from shardwright.models.layers.mtp import trunk_and_behind
from shardwright.models.layers.structure import described

ROWS, LENGTH = 3, 16  # shape of the trial run's tokens
UNUSED, UNLIKE = "", "?"  # neither is a path


@dataclass(frozen=True)
class LayerOutput:
    """The structure of a layer's output, without values."""

    # Of the flattened output: for a tensor the path of an argument of the same shape and dtype; without such an
    # argument `UNLIKE`, or `UNUSED` if nobody uses it; None for a leaf that is no tensor.
    leaves: tuple[str | None, ...]
    spec: Any


@dataclass(frozen=True)
class Seen:
    """One layer's call."""

    given: Any  # its arguments, without the values of tensors
    chain: tuple[tuple[str, int], ...]  # path of an argument → its number among the tensors of the layer before
    shape: LayerOutput
    follows: bool  # whether it can run in one scan with the layer before: nothing else uses that one's output
    alone: str  # why it can't run in one scan with any other layer; empty if it can


def watch(model: nn.Module, name: str, watched: Callable[[nn.Module, int], None]) -> list[Seen]:
    """Record the inputs and outputs of each layer of the list ``name`` in a copy of ``model``, which ``watched`` gets.

    Raises:
        ValueError: the decoder does not call its layers once each, in order.
        Exception: whatever the model raises where it can't be run on meta.
    """
    model = copy.deepcopy(model).to("meta").eval()
    layers, _ = trunk_and_behind(model.get_submodule(name).children())
    loop = _Loop(len(layers))
    for index, layer in enumerate(layers):
        watched(layer, index)
        layer.register_forward_pre_hook(functools.partial(loop.enter, index), with_kwargs=True)
        layer.register_forward_hook(functools.partial(loop.leave, index), with_kwargs=True)
    inputs: dict[str, Any] = {"input_ids": torch.zeros((ROWS, LENGTH), dtype=torch.int64, device="meta")}
    if hasattr(getattr(model, "config", None), "output_router_logits"):
        inputs["output_router_logits"] = False
    with torch.no_grad(), masks_without_reads(), loop:
        model(**inputs, use_cache=False)
    return loop.seen()


@dataclass
class _Notes:
    """One layer's call: argument leaves by path, output leaves, and the spec of both."""

    arguments: dict[str, Any]
    argument_spec: Any
    output: list[Any] = field(default_factory=list)
    output_spec: Any = None
    changed: bool = False

    @property
    def tensors(self) -> list[Tensor]:
        return [leaf for leaf in self.output if isinstance(leaf, Tensor)]


class _Loop(TorchFunctionMode):
    """Records layers' calls, and operations between them that use a layer's output."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count
        self.notes: list[_Notes] = []
        self.inside = False
        # (layer, number among the tensors of its output): of each tensor, by id, and those that an operation used
        self.sources: dict[int, set[tuple[int, int]]] = defaultdict(set)
        self.used: set[tuple[int, int]] = set()

    def enter(self, index: int, _: nn.Module, args: Any, kwargs: Any) -> None:
        if index != len(self.notes):
            raise ValueError(f"the decoder calls layer {index} after {len(self.notes)} others")
        found, spec = tree_flatten_with_path((args, kwargs))
        self.notes.append(_Notes({keystr(path): leaf for path, leaf in found}, spec))
        self.inside = True

    def leave(self, index: int, _: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        self.inside = False
        notes = self.notes[index]
        notes.output, notes.output_spec = tree_flatten(output)
        for number, tensor in enumerate(notes.tensors):
            self.sources[id(tensor)].add((index, number))
        after, spec = tree_flatten((args, kwargs))
        notes.changed = spec != notes.argument_spec or [*map(id, after)] != [*map(id, notes.arguments.values())]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.inside and getattr(func, "__name__", "") != "__get__":  # a shape or a dtype has no values
            for leaf in tree_flatten((args, kwargs or {}))[0]:
                self.used |= self.sources.get(id(leaf), set())
        return func(*args, **(kwargs or {}))

    def seen(self) -> list[Seen]:
        if len(self.notes) != self.count:
            raise ValueError(f"the decoder has {self.count} layers and calls {len(self.notes)} of them")
        return [self._seen(index, notes, self._paths(index, notes)) for index, notes in enumerate(self.notes)]

    def _seen(self, index: int, notes: _Notes, paths: list[str]) -> Seen:
        before = {id(t): k for k, t in enumerate(self.notes[index - 1].tensors)} if index else {}
        chain = {path: before[id(leaf)] for path, leaf in notes.arguments.items() if id(leaf) in before}
        older = {id(t) for earlier in self.notes[: max(index - 1, 0)] for t in earlier.tensors} - before.keys()
        skips = any(id(leaf) in older for leaf in notes.arguments.values())
        follows = bool(chain) and not skips and all(layer != index - 1 for layer, _ in self.used)
        given = (str(notes.argument_spec), [(path, _kind(leaf)) for path, leaf in notes.arguments.items()])
        rest = iter(paths)
        leaves = tuple(next(rest) if isinstance(leaf, Tensor) else None for leaf in notes.output)
        shape = LayerOutput(leaves, notes.output_spec)
        return Seen(given, tuple(sorted(chain.items())), shape, follows, self._alone(notes, paths))

    def _alone(self, notes: _Notes, paths: list[str]) -> str:
        if notes.changed:
            return "it changes an argument that it is given"
        if opaque := [path for path, leaf in notes.arguments.items() if described(leaf) is None]:
            return f"it is given an object ({type(notes.arguments[opaque[0]]).__name__})"
        kept = [at for at, leaf in enumerate(notes.output) if leaf is not None and not isinstance(leaf, Tensor)]
        if kept:
            return f"it returns an object ({type(notes.output[kept[0]]).__name__})"
        return "it returns a tensor of a shape that it was not given" if UNLIKE in paths else ""

    def _paths(self, index: int, notes: _Notes) -> list[str]:
        """For each tensor of the output, an argument like it: preferably the one that the next layer takes it as."""
        after = self.notes[index + 1].arguments if index + 1 < self.count else {}
        found = []
        for number, tensor in enumerate(notes.tensors):
            given = {path: leaf for path, leaf in notes.arguments.items() if isinstance(leaf, Tensor)}
            alike = [path for path, leaf in given.items() if _kind(leaf) == _kind(tensor)]
            passed = [path for path, leaf in after.items() if leaf is tensor]
            unlike = UNLIKE if passed or (index, number) in self.used else UNUSED
            found.append(next((path for path in passed if path in alike), next(iter(alike), unlike)))
        return found


def _kind(leaf: Any) -> Any:
    return (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else described(leaf)
