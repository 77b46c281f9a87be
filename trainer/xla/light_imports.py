"""Imports that cost a start less: modules that hardly any run uses come late, and the garbage collector rests.

Late are torch_xla's StableHLO exporter, Inductor's lowerings, and AOTAutograd's budget for kept activations, which asks
networkx: parts of torch and torch_xla, which no user imports. Loads neither torch nor torch_xla.
"""

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

# module → the names that are taken from it, and not used, where a run imports it
# semi-private: the modules that import these, of torch_xla 2.9 and torch 2.9
_TAKEN = {
    "torch_xla.stablehlo": ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
    "torch._inductor.lowering": ("fallback_node_due_to_unsupported_type",),
    # a budget for kept activations, which needs networkx
    "torch._functorch._activation_checkpointing.graph_info_provider": ("GraphInfoProvider",),
    "torch._functorch._activation_checkpointing.knapsack_evaluator": ("KnapsackEvaluator",),
}
_loads: dict[str, Callable[[], None]] = {}  # late module → its loading, once


class _StandIn:
    """A name of a module that is not loaded yet; to call it, or to ask for an attribute of it, loads the module."""

    def __init__(self, module: ModuleType, name: str) -> None:
        self._of = module, name

    def __call__(self, *args: Any, **named: Any) -> Any:
        return _loaded(*self._of)(*args, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(_loaded(*self._of, asked=name), name)


def _loaded(module: ModuleType, name: str, asked: str | None = None) -> Any:
    """The real ``name`` of a late module; raises AttributeError for those that look through all modules."""
    if (asked or name).startswith("__"):
        raise AttributeError(f"module {module.__name__!r} has no attribute {asked or name!r}")
    _loads[module.__name__]()
    return getattr(module, name)


class _Late(importlib.machinery.SourceFileLoader):
    """Leaves the module empty but for stand-ins of what is taken, until one of them or another name of it is used."""

    def exec_module(self, module: ModuleType) -> None:
        names, lock, left = vars(module), threading.RLock(), [super().exec_module]

        def load() -> None:
            with lock:  # another thread waits for the whole module
                if left:
                    del names["__getattr__"]
                    left.pop()(module)

        _loads[self.name] = load
        names["__getattr__"] = functools.partial(_loaded, module)
        names.update({name: _StandIn(module, name) for name in _TAKEN[self.name]})


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if load := _loads.get(fullname.rpartition(".")[0]):  # a package comes before its modules
            load()
        if fullname not in _TAKEN or (spec := importlib.machinery.PathFinder.find_spec(fullname, path, target)) is None:
            return None
        if spec.origin is not None:
            spec.loader = _Late(fullname, spec.origin)
        return spec


def put_off() -> None:
    """Have these modules load late; one that is imported already stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage inside the ``with``: of what is imported there hardly anything is any."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
