"""The functions of `models/` that are entered while a step is traced."""

from __future__ import annotations

import cProfile
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from shardwright.model import facts
from shardwright.models.ops.jax_call import jax
from tests.support.paths import ROOT

_FOLDER = f"{ROOT}/models/"
# the modules of the only functions that may differ by device (shardwright.models.ops.device_kernels)
_KERNELS = ("ops/tpu_kernels.py", "ops/plain_kernels.py")


@dataclass
class Functions:
    """Functions by file and name.

    Attributes:
        common: those of code that all devices share.
        kernels: the names of those that a device has of its own, without what is private to their module.
    """

    common: set[str] = field(default_factory=set)
    kernels: set[str] = field(default_factory=set)

    def add(self, file: str, name: str) -> None:
        if file not in _KERNELS:
            self.common.add(f"{file}: {name}")
        elif not name.startswith(("_", "<")):
            self.kernels.add(name.partition(".")[0])


@contextmanager
def entered() -> Iterator[Functions]:
    """Notes the functions that are entered inside; what was traced or tried before is forgotten, or is missing."""
    found = Functions()
    profile = cProfile.Profile(subcalls=False, builtins=False)  # in C; a tracer in Python takes longer
    jax.devices()  # the first such call of a process says a word of plugins, which a function of ours leaves out
    jax.clear_caches()
    facts._known.clear()
    for module in [module for name, module in sys.modules.items() if name.startswith("shardwright.models.")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    # no backward on a thread of its own, which this would not see
    with torch.autograd.set_multithreading_enabled(False):
        profile.enable()
        try:
            yield found
        finally:
            profile.disable()
    for entry in profile.getstats():
        code = entry.code
        if not isinstance(code, str) and code.co_filename.startswith(_FOLDER) and code.co_qualname != "<module>":
            found.add(code.co_filename.removeprefix(_FOLDER), code.co_qualname)
