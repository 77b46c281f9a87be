"""Imports that cost a start less: modules that hardly any run uses come late, and the garbage collector rests.

Late are torch_xla's StableHLO exporter, Inductor's lowerings and decompositions, and SciPy's optimizers. Loads neither
torch nor torch_xla.
"""

import contextlib
import gc
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

# module → the functions that are taken from it by name, and not called, where a run imports it
# semi-private: torch_xla/__init__.py, torch_xla 2.9; torch/_inductor/pattern_matcher.py, torch 2.9, which AOTAutograd
# imports for two functions that need neither; transformers/loss/loss_for_object_detection.py, transformers 5.23
_TAKEN = {
    "torch_xla.stablehlo": ("save_as_stablehlo", "save_torch_model_as_stablehlo"),
    "torch._inductor.lowering": ("fallback_node_due_to_unsupported_type",),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "scipy.optimize": ("linear_sum_assignment",),
}


class _Late(importlib.machinery.SourceFileLoader):
    """Leaves the module empty but for stand-ins of what is taken, until another name of it is read or one is called."""

    def exec_module(self, module: ModuleType) -> None:
        names = vars(module)

        def load() -> None:
            if names.pop("__getattr__", None) is not None:
                super(_Late, self).exec_module(module)

        def missing(name: str) -> Any:
            if name.startswith("__"):  # asked by those who look through all modules
                raise AttributeError(f"module {self.name!r} has no attribute {name!r}")
            load()
            return getattr(module, name)

        def stand_in(name: str) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                load()
                return names[name](*args, **named)

            return call

        names["__getattr__"] = missing
        names.update({name: stand_in(name) for name in _TAKEN[self.name]})


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
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
    """Collect no garbage inside the ``with``, nor walk later what is there at its end: imported modules stay.

    They are half a million objects, which each full collection afterwards, and the one at the end, would walk.
    """
    was_on = gc.isenabled()
    gc.collect()  # what is garbage already would be kept for good
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_on:
            gc.enable()
