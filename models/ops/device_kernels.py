"""The choice of kernels by device, the only code of this package that differs by device.

All callers run alike, so a check on virtual devices, which get :mod:`shardwright.models.ops.plain_kernels`, checks the
code that a TPU runs with :mod:`shardwright.models.ops.tpu_kernels`, and an NVIDIA GPU with
:mod:`shardwright.models.ops.cuda_kernels`.
"""

import importlib
from typing import Any

from shardwright.models.ops.jax_call import target


def kernels() -> Any:
    # imported on demand: they are large
    name = target()
    return importlib.import_module(f"shardwright.models.ops.{name if name in ('tpu', 'cuda') else 'plain'}_kernels")
