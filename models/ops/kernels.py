"""The functions that a device computes in its own way: all that differs by device in this package.

A TPU has those of :mod:`shardwright.models.ops.tpu_kernels`, and every other device the same functions in
:mod:`shardwright.models.ops.plain_kernels`. What calls them runs alike on all, so that a check on virtual devices is
one of what a TPU runs.
"""

from __future__ import annotations

import importlib
from typing import Any

from shardwright.models.ops.jax_call import target


def kernels() -> Any:
    """The module of the functions for the graph that is being built."""
    # imported when asked for: a TPU's are large
    name = "tpu_kernels" if target() == "tpu" else "plain_kernels"
    return importlib.import_module(f"shardwright.models.ops.{name}")
