"""torch_xla's StableHLO exporter, loaded when somebody first asks it for something.

torch_xla imports it for two functions that a run never calls, and with it comes all of Inductor: over a second of CPU
time at every start. Loads neither torch nor torch_xla.
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

_NAME = "torch_xla.stablehlo"
# semi-private: __init__.py, torch_xla 2.9: it takes these from the module, and nothing else does
_TAKEN = ("save_as_stablehlo", "save_torch_model_as_stablehlo")


class _Late(importlib.machinery.SourceFileLoader):
    """Leaves the module empty but for stand-ins of ``_TAKEN``, until another name of it is read or one is called."""

    def exec_module(self, module: ModuleType) -> None:
        names = vars(module)

        def load() -> None:
            if names.pop("__getattr__", None) is not None:
                super(_Late, self).exec_module(module)

        def missing(name: str) -> Any:
            if name.startswith("__"):  # asked by those who look through all modules
                raise AttributeError(f"module {_NAME!r} has no attribute {name!r}")
            load()
            return getattr(module, name)

        def stand_in(name: str) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                load()
                return names[name](*args, **named)

            return call

        names["__getattr__"] = missing
        names.update({name: stand_in(name) for name in _TAKEN})


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _NAME or (spec := importlib.machinery.PathFinder.find_spec(fullname, path, target)) is None:
            return None
        if spec.origin is not None:
            spec.loader = _Late(fullname, spec.origin)
        return spec


def put_off() -> None:
    """Have the next import of torch_xla leave its exporter for later; one that is loaded stays as it is."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
