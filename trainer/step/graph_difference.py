"""The first operation in which two traces of a step differ, with its module and its line of Python.

The first trace's HLO text is kept, compressed. Only a step that has compiled again is traced once more, now with
torch_xla's notes of where each operation comes from, which cost time and are off otherwise.
"""

import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch_xla
from torch.overrides import TorchFunctionMode

from shardwright.models.ops.partial_gradients import Tensors
from shardwright.xla.runtime import wait_for_devices

Trace = Callable[[Tensors], Tensors]  # a batch → the results of its graph

_LIBRARY = sysconfig.get_paths()["purelib"]
_PASSED = (f"{_LIBRARY}/torch/", f"{_LIBRARY}/torch_xla/")  # no line of the model is there
_COMPUTATION = re.compile(r"^(?:ENTRY )?(%\S+) .*\{$")
_OPERATION = re.compile(r"^ +(?:ROOT )?(?P<name>%\S+) = (?P<text>(?P<result>.+?) (?P<kind>[\w\-]+)\(.*)$")
_NAME = re.compile(r"%[\w.\-]+")
_METADATA = re.compile(r", metadata=\{[^{}]*\}")
# parameters are numbered anew in each trace, and a kernel's code says where it was made
_CHANGING = re.compile(r"(?<= parameter\()\d+|[A-Za-z0-9+/=]{200,}")
_SCOPES = re.compile(r'op_name="([^"]*)"')
_LINE = "line "  # the prefix of a scope that names a line of Python


class _Lines(TorchFunctionMode):
    """Opens a scope around each operation, named by the line of Python that calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and (
            frame.f_code.co_name == "__torch_function__" or frame.f_code.co_filename.startswith(_PASSED)
        ):
            frame = frame.f_back
        self.places.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        # semi-private: torch_xla/debug/profiler.py, torch_xla 2.9
        pusher = torch_xla._XLAC.profiler.scope_pusher(f"{_LINE}{len(self.places) - 1}")
        try:
            return func(*args, **(kwargs or {}))
        finally:
            del pusher


def graph_text(results: Tensors) -> bytes:
    """The HLO of the pending computation of ``results``, compressed."""
    # results of a computation that still runs have no buffers yet, and to lower a graph that reads them is a crash
    wait_for_devices()
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    return zlib.compress(torch_xla._XLAC._get_xla_tensors_hlo(list(results.values())).encode(), 1)


def first_difference(before: bytes, results: Tensors, trace: Callable[[], Tensors]) -> str:
    """Trace a step once more, and name in words its first operation that ``before`` (:func:`graph_text`) has not.

    ``results``, computed, keep their values where ``trace`` changes them in place.
    """
    values = {name: tensor.detach().clone() for name, tensor in results.items()}
    lines = _Lines()
    torch_xla._XLAC._set_ir_debug(True)  # semi-private, as above
    try:
        with lines:
            after = graph_text(trace())
    finally:
        torch_xla._XLAC._set_ir_debug(False)
    with torch.no_grad():
        for name, value in values.items():
            results[name].copy_(value)
    known = {value for value, _ in _operations(before)}
    found = next((operation for value, operation in _operations(after) if value not in known), None)
    if found is None:
        return "traced once more, its operations are the first step's: the change came and went"
    return f"the first new operation is {_words(found, lines.places)}"


def _operations(text: bytes) -> Iterator[tuple[int, re.Match[str]]]:
    """Each operation's line, and a number that is equal for two that compute the same."""
    values: dict[str, int] = {}  # operation or computation → a hash of what it computes
    computation, inside = "", 0
    for line in zlib.decompress(text).decode().splitlines():
        if (head := _COMPUTATION.match(line)) is not None:
            computation, inside = head[1], 0
        elif (found := _OPERATION.match(line)) is not None:
            plain = _CHANGING.sub("", _METADATA.sub("", found["text"]))
            value = hash(_NAME.sub(lambda name: str(values.get(name[0])), plain))
            values[found["name"]], inside = value, hash((inside, value))
            values[computation] = inside
            yield value, found


def _words(operation: re.Match[str], places: Sequence[str]) -> str:
    """``tanh of f32[32,64] in model.layers.0.mlp, from FILE:LINE``, as far as it is known."""
    result, scopes = re.sub(r"\{[\d,]*\}", "", operation["result"]), _SCOPES.search(operation.string)
    # outermost first: torch_xla numbers scopes, and puts torch's operations behind them
    opened = [re.sub(r"\.\d+$", "", scope) for scope in scopes[1].split("/")] if scopes else []
    modules = [scope for scope in opened if scope and "__" not in scope and not scope.startswith(_LINE)]
    numbers = [int(scope.removeprefix(_LINE)) for scope in opened if scope.startswith(_LINE)]
    where = f" in {modules[-1]}" if modules else ""
    return f"{operation['kind']} of {result}{where}" + (f", from {places[numbers[-1]]}" if numbers else "")
