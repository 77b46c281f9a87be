"""Imports that cost a start less: modules that hardly any run uses come late, and the garbage collector rests.

Late are torch_xla's StableHLO exporter, Inductor's lowerings and what transformers and accelerate import for other
tasks; and its thousands of files are read once, not twice. Loads neither torch nor torch_xla.
"""

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

# module → the names that are taken from it, and not used, where a run imports it
# semi-private: the modules that import these, of torch_xla 2.9, torch 2.9, transformers 5.23 and accelerate 1.15
_TAKEN = {
    "torch_xla.stablehlo": ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
    "torch._inductor.lowering": ("fallback_node_due_to_unsupported_type",),
    # a budget for kept activations, which needs networkx
    "torch._functorch._activation_checkpointing.graph_info_provider": ("GraphInfoProvider",),
    "torch._functorch._activation_checkpointing.knapsack_evaluator": ("KnapsackEvaluator",),
    "scipy.optimize": ("linear_sum_assignment",),  # in losses of object detection
    "requests": (),  # asks Google's servers about a TPU VM
    "boto3": (),  # configures SageMaker
}
_LISTS = "transformers.utils.import_utils"  # semi-private functions of it, transformers 5.23
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


class _Lists(importlib.machinery.SourceFileLoader):
    """Has transformers list the classes of its files once, and not again for each of its packages."""

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        utils: Any = module
        fetch, kept = utils.fetch__all__, functools.cache(utils.create_import_structure_from_path)

        def create_import_structure_from_path(module_path: str | os.PathLike[str]) -> Any:
            return kept(os.path.dirname(module_path) if os.path.isfile(module_path) else os.fspath(module_path))

        def fetch__all__(file_content: str) -> list[str]:
            return fetch(file_content[file_content.rfind("\n__all__") + 1 :])  # the last one counts

        utils.create_import_structure_from_path, utils.fetch__all__ = create_import_structure_from_path, fetch__all__


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if load := _loads.get(fullname.rpartition(".")[0]):  # a package comes before its modules
            load()
        loader = _Late if fullname in _TAKEN else _Lists if fullname == _LISTS else None
        if loader is None or (spec := importlib.machinery.PathFinder.find_spec(fullname, path, target)) is None:
            return None
        if spec.origin is not None:
            spec.loader = loader(fullname, spec.origin)
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
