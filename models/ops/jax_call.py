"""A JAX function as one operation of the torch graph: batched gathers, sorts, Pallas kernels, `shard_map`.

torch_xla's own `call_jax` needs torchax and flax, and lowers for the machine it runs on. This one needs jax alone (at
torch_xla's pin) and lowers for the *target*: the devices of this process, or a TPU that this machine does not have
(:func:`lowering_for`). jax only traces and lowers; it runs nothing. Modules that use jax import it from here, because
it must be configured first.
"""

import contextlib
import functools
import itertools
import logging
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch_xla
import torch_xla.runtime as xr
from torch import Tensor

# jax shares the process with torch_xla's runtime, which owns the accelerator: jax must not open it a second time,
# whatever an image that is made for jax says
os.environ["JAX_PLATFORMS"] = "cpu"
import jax
import numpy as np

# semi-private: jax/_src/interpreters/mlir.py and jax/_src/lib/__init__.py, jax 0.7.1 (`LoweringParameters` and the
# conversion of a module to HLO have no public names)
from jax._src.interpreters import mlir
from jax._src.lib import xla_client

jax.config.update("jax_platforms", "cpu")  # it may have been imported before
# The partitioner here is GSPMD, whose annotations are torch_xla's.
jax.config.update("jax_use_shardy_partitioner", False)
# Its package for CUDA, of which torch_xla takes the library alone, does not start without another one, and jax logs
# that with a traceback (semi-private: jax/_src/xla_bridge.py, jax 0.7.1).
logging.getLogger("jax._src.xla_bridge").addFilter(lambda record: "Jax plugin configuration" not in str(record.msg))

Array = jax.Array
jnp, lax = jax.numpy, jax.lax
Axes = tuple[str, ...]
# for each dimension of a tensor: None, the mesh axis that splits it, or several in mesh order
Spec = tuple[str | Axes | None, ...]

# of arrays, each with its dtype
Shapes = tuple[tuple[tuple[int, ...], str], ...]

# platform, and compiler flags; not a ContextVar: autograd builds backwards on threads of its own
_target: list[tuple[str, str]] = []
_ASYNCHRONOUS = "xla_tpu_enable_async_all_to_all=true"
_SPARSE_CORES = "xla_tpu_enable_sparse_core_collective_offload_all_gather=true"

_NAMES = ("float32", "bfloat16", "float16", "int32", "int8", "uint8", "bool")
_DTYPES = {getattr(torch, name): name for name in _NAMES}


def lowered_for() -> tuple[str, str]:
    """The platform (``tpu`` or ``cpu``) and flags that the graph is being built for: kernels depend on both."""
    if _target:
        platform, flags = _target[-1]
    else:
        platform, flags = str(xr.device_type()).lower(), os.environ.get("LIBTPU_INIT_ARGS", "")
    # virtual devices stand in for a v5p or a v6e
    return platform, _ASYNCHRONOUS if platform == "cpu" else flags


def target() -> str:
    """The platform that the graph is being built for."""
    return lowered_for()[0]


def exchanges_beside() -> bool:
    """Whether the compiler overlaps an all-to-all with compute."""
    return _ASYNCHRONOUS in lowered_for()[1]


def gathers_beside() -> bool:
    """Whether the compiler gives all-gathers to the sparse cores, which overlap them with compute."""
    # libtpu 0.0.21 does so only with a gather or a reduce-scatter along one dimension of the torus
    return _SPARSE_CORES in lowered_for()[1]


@contextlib.contextmanager
def lowering_for(platform: str, compiler_flags: str = "") -> Iterator[None]:
    """Inside, kernels are chosen and lowered for ``platform`` and ``compiler_flags``, a text as in LIBTPU_INIT_ARGS."""
    _target.append((platform, compiler_flags))
    try:
        yield
    finally:
        _target.pop()


@dataclass(frozen=True)
class Manual:
    """The layouts for running a function on each device's own shards, with its own collectives (`jax.shard_map`)."""

    axes: tuple[tuple[str, int], ...]  # (name, size) of every mesh axis, in mesh order
    inputs: tuple[Spec, ...]
    outputs: tuple[Spec, ...]  # along an axis that none of them names, the outputs must be equal
    order: tuple[int, ...] | None = None  # the device ids in mesh order; None: 0, 1, 2, …


def jax_call(
    function: Callable[..., Any], *tensors: Tensor, manual: Manual | None = None, **static: Any
) -> list[Tensor]:
    """Return ``function(*arrays, **static)`` for XLA tensors, as a list of outputs, without gradients.

    Call it inside an operation (:mod:`shardwright.models.ops.operation`). ``function`` is a module-level JAX function,
    lowered once for each set of shapes, dtypes and (hashable) options. Without ``manual`` it runs on whole arrays,
    which the partitioner splits.
    """
    # jax has no 64-bit integers here (Pallas kernels break with them)
    tensors = tuple(t.to(torch.int32) if t.dtype == torch.int64 else t for t in tensors)
    shapes = tuple((tuple(t.shape), _DTYPES[t.dtype]) for t in tensors)
    computation = _computation(function, shapes, manual, tuple(sorted(static.items())), target())
    # semi-private: torch_xla/core/xla_op_registry.py, torch_xla 2.9
    out = torch_xla._XLAC._xla_user_computation("xla::jax_call", list(tensors), computation)
    return list(out) if isinstance(out, list | tuple) else [out]


# A function that is lowered again gets new channel numbers, which make the step a new graph: the bound is far above the
# number of functions in a run.
@functools.lru_cache(maxsize=1024)
def _computation(
    function: Callable[..., Any],
    shapes: Shapes,
    manual: Manual | None,
    static: tuple[tuple[str, Any], ...],
    platform: str,
) -> Any:
    def flat(*arrays: Any) -> tuple[Any, ...]:
        result = function(*arrays, **dict(static))
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
    # without `for_export`, Pallas kernels are lowered for a newer Mosaic than libtpu's
    # (semi-private: `_private_parameters` of jax/_src/stages.py, jax 0.7.1)
    lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=mlir.LoweringParameters(for_export=True))
    text = str(lowered.compiler_ir())
    if manual is not None:
        text = _reorder(text, manual.order) if manual.order else text
        # no two collectives of a step may share a channel
        handle = r"(#stablehlo\.channel_handle<handle = )\d+"
        text = re.sub(handle, lambda match: match[1] + str(next(_channels)), text)
    # semi-private: jaxlib/xla_client.py, jaxlib 0.7.1; torch_xla/core/xla_builder.py, torch_xla 2.9
    module = xla_client._xla.mlir.mlir_module_to_xla_computation(text, use_tuple_args=False, return_tuple=True)
    return torch_xla._XLAC._xla_op_computation_from_module_proto(
        getattr(function, "__name__", "jax_call"), module.as_serialized_hlo_module_proto()
    )


_channels = itertools.count(1_000_000)


def _reorder(text: str, order: tuple[int, ...]) -> str:
    """Replace mesh positions, which are all that jax knows here, by device ids in a StableHLO module."""
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
        if match[2].startswith('"0x'):  # the format of a long list
            found = np.frombuffer(bytes.fromhex(match[2][3:-1]), "<i8")
            return match[1] + '"0x' + ids[found].astype("<i8").tobytes().hex().upper() + '"' + match[3]
        return match[1] + re.sub(r"\d+", lambda number: str(ids[int(number[0])]), match[2]) + match[3]

    text = re.sub(r"<=\[([\d,]+)\](?:T\(([\d,]+)\))?", sharding, text)
    return re.sub(r"((?:replica_groups|source_target_pairs) = dense<)([^>]*)(>)", groups, text)
