"""Groups of a decoder's layers that repeat, found by comparing their structure and the calls that they get.

No family is named. Two layers are alike if they have the same modules, settings and shapes and are called alike. A
float that differs between them may become data; a differing integer (most often the layer's own number) is ignored if
the layer never reads it.
"""

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwright.models.layers.decoder_loop import Seen, watch
from shardwright.models.layers.mtp import trunk_and_behind
from shardwright.models.layers.structure import attributes, described

# (dotted name of a module in its layer, attribute)
Where = tuple[str, str]


@dataclass(frozen=True)
class Repetition:
    """Layers ``start``, ``start`` + 1, …: a period of ``period`` layers that repeats ``count`` times."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        return self.start + self.period * self.count


@dataclass(frozen=True)
class Grouping:
    """The division of a decoder's layers into runs."""

    runs: tuple[Repetition, ...]
    seen: tuple[Seen, ...]
    floats: frozenset[Where]  # attributes that become data, because they differ between layers that are else alike
    apart: dict[int, str]  # number of a layer → why it is not run with any other


def group(model: nn.Module, name: str) -> Grouping:
    """Divide the layers of the list ``name`` of ``model``, which is on meta, into runs.

    Raises:
        ValueError: the decoder can't be run on meta, or not as a loop over its layers; says why.
    """
    layers, _ = trunk_and_behind(model.get_submodule(name).children())
    shared = _shared(model, name)
    alike = defaultdict(list)
    for index, layer in enumerate(layers):
        alike[tuple(_structure(layer, numbers=False))].append(index)
    differing = {where for group in alike.values() for where in _differing([layers[i] for i in group])}
    floats = frozenset(w for w in differing if all(type(_get(layer, w)) is float for layer in layers if _has(layer, w)))
    integers = differing - floats
    for stacked in dict.fromkeys((floats, frozenset())):  # some families can't use a tensor in place of a float
        try:
            seen, read = _watch(model, name, stacked, integers)
            break
        except Exception as error:  # a family's code raises anything, and the error is the reason
            why = error
    else:
        raise ValueError(f"its decoder can't be followed ({type(why).__name__}: {str(why).partition(chr(10))[0]})")
    ignored = {(i, w) for w in stacked for i in range(len(layers))}
    ignored |= {(i, w) for w in integers for i in range(len(layers)) if (i, w) not in read}
    signatures: list[Any] = []
    apart = {}
    for index, (layer, call) in enumerate(zip(layers, seen, strict=True)):
        if why_alone := call.alone or shared.get(index, ""):
            apart[index] = why_alone
        own = [line for line in _structure(layer, numbers=True) if (index, line[0]) not in ignored]
        # which argument an output is like does not matter: the last layer has no next layer to tell
        returned = (str(call.shape.spec), [path and "a tensor" for path in call.shape.leaves])
        signatures.append((index if why_alone else None, own, call.given, returned))
    runs = cut(signatures, [call.chain if call.follows else None for call in seen])
    return Grouping(tuple(runs), tuple(seen), stacked, apart)


def cut(signatures: Sequence[Any], chains: Sequence[Any], low: int = 0, high: int | None = None) -> list[Repetition]:
    """Divide the layers from ``low`` to ``high`` into runs with the fewest layers to trace.

    ``signatures`` are equal for layers that are alike. ``chains`` tell how each layer takes the output of the one
    before; None: they can't be in one run.
    """
    high = len(signatures) if high is None else high
    best = max(
        (run for period in range(1, (high - low) // 2 + 1) for run in _runs(signatures, chains, (low, high), period)),
        key=lambda run: (run.period * (run.count - 1), -run.period, -run.start),
        default=None,
    )
    if best is None:
        return [Repetition(index, 1, 1) for index in range(low, high)]
    return [*cut(signatures, chains, low, best.start), best, *cut(signatures, chains, best.stop, high)]


def _runs(
    signatures: Sequence[Any], chains: Sequence[Any], bounds: tuple[int, int], period: int
) -> Iterator[Repetition]:
    """Yield the longest run of that period that starts at each layer."""
    low, high = bounds
    matched, open_until = 0, high  # layers from here on that match the one a period on; the end of the chain
    for start in reversed(range(low, high)):
        later = start + period
        count = 0
        if later < high and signatures[start] == signatures[later]:
            # the run's first layer takes its input from elsewhere, so its chain is not compared
            count = (matched + 1) // period + 1
            matched = matched + 1 if chains[start] is not None and chains[start] == chains[later] else 0
        else:
            matched = 0
        count = min(count, (open_until - start) // period)
        if count > 1:
            yield Repetition(start, period, count)
        if chains[start] is None:
            open_until = start


def _watch(
    model: nn.Module, name: str, floats: frozenset[Where], integers: set[Where]
) -> tuple[list[Seen], set[tuple[int, Where]]]:
    """Record each layer's call, with ``floats`` as tensors, and the ``integers`` that each layer reads."""
    read: set[tuple[int, Where]] = set()

    def watched(layer: nn.Module, index: int) -> None:
        for where in floats | integers:
            if _has(layer, where):
                module, value = layer.get_submodule(where[0]), _get(layer, where)
                if where in floats:
                    setattr(module, where[1], torch.empty((), device="meta"))
                elif isinstance(value, int) and not isinstance(value, bool):
                    setattr(module, where[1], _WatchedInteger(value, functools.partial(read.add, (index, where))))
                else:
                    read.add((index, where))

    return watch(model, name, watched), read


class _WatchedInteger:
    """An integer that reports being read."""

    def __init__(self, value: int, tell: Callable[[], None]) -> None:
        self._value, self._tell = value, tell


def _reading(operation: str) -> Callable[..., Any]:
    def method(self: _WatchedInteger, *args: Any) -> Any:
        self._tell()
        return getattr(self._value, operation)(*args)

    return method


for _name in (
    *(f"__{side}{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow") for side in ("", "r")),
    *(f"__{name}__" for name in ("index", "int", "float", "bool", "neg", "eq", "ne", "lt", "le", "gt", "ge", "hash")),
    *(f"__{name}__" for name in ("str", "repr", "format")),
):
    setattr(_WatchedInteger, _name, _reading(_name))


def _shared(model: nn.Module, name: str) -> dict[int, str]:
    """Map the number of each layer that shares a parameter with anything else to the reason to print."""
    names = defaultdict(list)
    for full, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(full)
    depth = name.count(".") + 1
    shared = (full for tied in names.values() for full in tied if len(tied) > 1 and full.startswith(f"{name}."))
    return {int(full.split(".")[depth]): f"it shares {full}" for full in shared}


def _structure(layer: nn.Module, *, numbers: bool) -> Iterator[tuple[Where, Any]]:
    """Yield a line for each module, attribute (numbers only if ``numbers``), parameter and buffer of a layer."""
    for path, module in layer.named_modules():
        yield (path, ""), type(module)
        for key, value in sorted(attributes(module).items()):
            if numbers or not (isinstance(value, int | float) and not isinstance(value, bool)):
                known = described(value)
                yield (path, key), ("object", id(value)) if known is None else known
        for key, parameter in module.named_parameters(recurse=False):
            yield (path, key), (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)
        for key, buffer in module.named_buffers(recurse=False):
            kept = key in module._non_persistent_buffers_set  # semi-private: torch/nn/modules/module.py, torch 2.9
            yield (path, key), (tuple(buffer.shape), buffer.dtype, kept)


def _differing(layers: Sequence[nn.Module]) -> Iterator[Where]:
    """Yield the numbers that differ between ``layers``, which have the same modules."""
    values: dict[Where, set[Any]] = defaultdict(set)
    for layer in layers:
        for path, module in layer.named_modules():
            for key, value in attributes(module).items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    values[path, key].add((type(value), value))
    yield from (where for where, found in values.items() if len(found) > 1)


def _has(layer: nn.Module, where: Where) -> bool:
    return any(path == where[0] and where[1] in vars(module) for path, module in layer.named_modules())


def _get(layer: nn.Module, where: Where) -> Any:
    return getattr(layer.get_submodule(where[0]), where[1])
