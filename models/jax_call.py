"""A JAX function as one operation of the torch graph: batched gathers, sorts, Pallas kernels, `shard_map`.

torch_xla's own `call_jax` asks for torchax and flax, and lowers for the machine it runs on. This one needs jax alone
(at torch_xla's pin) and lowers for the *target*: the devices of this process, or a TPU that is nowhere near
(:func:`lowering_for`). No module but this one and those with kernels written in JAX imports jax; none runs on it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr

# jax shares the process with torch_xla's runtime, which owns the accelerator: it must not open it a second time.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
import jax
import numpy as np

# Semi-private, pinned with jax: without `for_export` Pallas kernels are lowered for a newer Mosaic than libtpu's.
from jax._src.interpreters import mlir
from jax._src.lib import xla_client

# The partitioner here is GSPMD, whose annotations are torch_xla's.
jax.config.update("jax_use_shardy_partitioner", False)

# not a ContextVar: backwards are built on threads of autograd's own
_target: list[str] = []

_DTYPES = {
    torch.float32: "float32",
    torch.bfloat16: "bfloat16",
    torch.float16: "float16",
    torch.int32: "int32",
    torch.bool: "bool",
}


def target() -> str:
    """What the graph is being built for: ``tpu`` or ``cpu``."""
    return _target[-1] if _target else str(xr.device_type()).lower()


@contextlib.contextmanager
def lowering_for(platform: str) -> Iterator[None]:
    """Inside, kernels are chosen and lowered for ``platform``, whatever devices this process has."""
    _target.append(platform)
    try:
        yield
    finally:
        _target.pop()


Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclass(frozen=True)
class Manual:
    """Where a function runs on each device's own shards, with collectives of its own (`jax.shard_map`).

    Args:
        axes: (name, size) of every mesh axis, in mesh order.
        inputs: a partition spec for each tensor; a dimension is named by None, an axis, or several in mesh order.
        outputs: likewise for each output. An axis that no output spec names: its devices' outputs are equal.
        order: the device ids in mesh order; None: 0, 1, 2, …
    """

    axes: tuple[tuple[str, int], ...]
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]
    order: tuple[int, ...] | None = None


def jax_call(
    function: Callable[..., Any], *tensors: torch.Tensor, manual: Manual | None = None, **static: Any
) -> tuple[torch.Tensor, ...]:
    """``function(*arrays, **static)`` on XLA tensors; a tuple of outputs, always.

    No gradient flows through. Call it inside a ``torch.library.custom_op``, so that AOTAutograd sees one node.

    Args:
        function: a module-level JAX function: it is lowered once for each set of shapes, dtypes and options.
        manual: run it shard by shard; None: on whole arrays, which the partitioner splits as it sees fit.
        **static: hashable options.
    """
    # jax knows no 64-bit integers here (Pallas kernels break with them)
    tensors = tuple(t.to(torch.int32) if t.dtype == torch.int64 else t for t in tensors)
    shapes = tuple((tuple(t.shape), _DTYPES[t.dtype]) for t in tensors)
    computation = _computation(function, shapes, manual, tuple(sorted(static.items())), target())
    out = torch_xla._XLAC._xla_user_computation("xla::jax_call", list(tensors), computation)
    return tuple(out) if isinstance(out, list | tuple) else (out,)


@functools.cache
def _computation(
    function: Callable[..., Any],
    shapes: tuple[tuple[tuple[int, ...], str], ...],
    manual: Manual | None,
    static: tuple[tuple[str, Any], ...],
    platform: str,
) -> Any:
    run = functools.partial(function, **dict(static))

    def flat(*arrays: Any) -> tuple[Any, ...]:
        result = run(*arrays)
        return tuple(result) if isinstance(result, list | tuple) else (result,)

    if manual is not None:
        names, sizes = zip(*manual.axes, strict=True)
        flat = jax.shard_map(
            flat,
            mesh=jax.sharding.AbstractMesh(sizes, names),
            in_specs=tuple(jax.P(*spec) for spec in manual.inputs),
            out_specs=tuple(jax.P(*spec) for spec in manual.outputs),
            check_vma=False,
        )
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    traced = jax.jit(flat, keep_unused=True).trace(*arguments)
    lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=mlir.LoweringParameters(for_export=True))
    text = str(lowered.compiler_ir())
    if manual is not None:
        text = _own_channels(_reorder(text, manual.order) if manual.order else text)
    module = xla_client._xla.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    return torch_xla._XLAC._xla_op_computation_from_module_proto(
        getattr(function, "__name__", "jax_call"), module.as_serialized_hlo_module_proto()
    )


_channels = itertools.count(1_000_000)


def _own_channels(text: str) -> str:
    """Number the collectives of a StableHLO module anew: those of one step must not share channels."""
    return re.sub(r"(#stablehlo\.channel_handle<handle = )\d+", lambda match: match[1] + str(next(_channels)), text)


def _reorder(text: str, order: tuple[int, ...]) -> str:
    """Say device ids where jax, which knows no devices here, has said positions in the mesh."""
    ids = np.asarray(order)
    if (ids == np.arange(len(ids))).all():
        return text
    if "stablehlo.partition_id" in text:
        raise ValueError("jax.lax.axis_index tells a position in jax's own order of devices: pass positions as data")

    def sharding(match: re.Match[str]) -> str:
        dims, transpose = ([int(d) for d in (group or "").split(",") if d] for group in match.group(1, 2))
        positions = np.arange(len(ids)).reshape(dims)
        return ",".join(map(str, ids[positions.transpose(transpose or None).ravel()]))

    def groups(match: re.Match[str]) -> str:
        return match[1] + re.sub(r"\d+", lambda number: str(ids[int(number[0])]), match[2]) + match[3]

    text = re.sub(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", sharding, text)
    return re.sub(r"(replica_groups = dense<)([^>]*)(>)", groups, text)
