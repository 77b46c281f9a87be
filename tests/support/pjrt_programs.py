"""The part of `tests.support.pjrt_devices` that compiles, keeps, loads and executes torch_xla's programs."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import numpy as np

# semi-private: jaxlib/xla_client.py (_xla is jaxlib/_jax.so), jaxlib 0.7.1
from jax._src.lib import xla_client

from tests.support.pjrt_devices import NUMBERS, Buffer, devices, local
from tests.support.pjrt_table import function, give_array, give_bytes, give_text, handle, objects, read_array


class _Program(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("code", ctypes.c_void_p),
        ("code_size", ctypes.c_size_t),
        ("form", ctypes.c_void_p),
        ("form_size", ctypes.c_size_t),
    ]


class Executable:
    """A program of torch_xla's on jax's client, for all devices of all processes.

    Args:
        make: the client's program, of its devices and the options.
    """

    def __init__(self, options: bytes, make: Callable[[Any, Any], Any]) -> None:
        parsed = xla_client.CompileOptions.ParseFromString(options)
        self.shape = (parsed.num_replicas, parsed.num_partitions)
        ids = np.array([device.jax.id for device in devices]).reshape(self.shape)
        parsed.device_assignment = xla_client.DeviceAssignment.create(ids)
        self.loaded = make(xla_client.DeviceList(tuple(device.jax for device in devices)), parsed)
        self.module = self.loaded.hlo_modules()[0]
        self.proto = self.module.as_serialized_hlo_module_proto()
        result = xla_client.XlaComputation(self.proto).program_shape().result_shape()
        self.outputs = result.tuple_shapes() if result.is_tuple() else [result]

    @cached_property
    def with_config(self) -> bytes:
        """The module as HloModuleProtoWithConfig, whose config says the entry's shapes alone."""
        shapes = _delimited(1, _field(self.proto, 4))  # HloModuleProto.host_program_shape
        return _delimited(1, self.proto) + _delimited(2, shapes)


def _note(hlo: bytes) -> None:
    """Adds a program's checksum to this process's file in HOST_PROGRAMS, if that names a folder.

    It is that of the text: in the bytes protobuf puts a map's entries in any order.
    """
    if folder := os.environ.get("HOST_PROGRAMS"):
        text = xla_client.XlaComputation(hlo).as_hlo_text()
        with open(f"{folder}/{jax.process_index()}", "a") as file:
            file.write(hashlib.sha256(text.encode()).hexdigest() + "\n")


def _varint(number: int) -> bytes:
    low = number & 127
    return bytes([low]) if number < 128 else bytes([low | 128]) + _varint(number >> 7)


def _delimited(number: int, content: bytes) -> bytes:
    """A protobuf field of bytes."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _field(message: bytes, wanted: int) -> bytes:
    """The content of a protobuf message's field of bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        found, shift = 0, 0
        while True:
            byte, at = message[at], at + 1
            found, shift = found | (byte & 127) << shift, shift + 7
            if byte < 128:
                return found

    while True:
        key = varint()
        if key & 7 == 0:
            varint()
            continue
        size = varint() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
        if key >> 3 == wanted:
            return message[at : at + size]
        at += size


@function(
    "Client_Compile",
    *("client:pointer", "program:pointer", "options:pointer", "options_size:size", "executable:pointer"),
)
def _(args: Any) -> None:
    program = _Program.from_address(args.program)
    assert ctypes.string_at(program.form, program.form_size) == b"hlo"
    hlo = ctypes.string_at(program.code, program.code_size)
    _note(hlo)
    module = xla_client._xla.mlir.xla_computation_to_mlir_module(xla_client.XlaComputation(hlo))
    options = ctypes.string_at(args.options, args.options_size)
    compile_and_load = functools.partial(devices[0].jax.client.compile_and_load, module)
    args.executable = handle(Executable(options, compile_and_load))


@function(
    "Executable_Serialize",
    *("executable:pointer", "data:pointer", "size:size", "holder:pointer", "deleter:pointer"),
)
def _(args: Any) -> None:
    client = devices[0].jax.client
    give_bytes(args, client.serialize_executable(objects[args.executable].loaded))


@function(
    "Executable_DeserializeAndLoad",
    *("client:pointer", "data:pointer", "size:size", "executable:pointer", "options:pointer", "options_size:size"),
)
def _(args: Any) -> None:
    load = functools.partial(devices[0].jax.client.deserialize_executable, ctypes.string_at(args.data, args.size))
    args.executable = handle(Executable(ctypes.string_at(args.options, args.options_size), load))


@function("Executable_OptimizedProgram", "executable:pointer", "program:pointer")
def _(args: Any) -> None:
    found, program = objects[args.executable].with_config, _Program.from_address(args.program)
    give_text(program, "form", "hlo_with_config")
    if program.code:
        ctypes.memmove(program.code, found, len(found))
    program.code_size = len(found)


@function("LoadedExecutable_GetExecutable", "loaded:pointer", "executable:pointer")
def _(args: Any) -> None:
    args.executable = args.loaded


@function("Executable_Destroy", "executable:pointer")
@function("LoadedExecutable_Destroy", "executable:pointer")
def _(args: Any) -> None:
    pass


@function("LoadedExecutable_Delete", "executable:pointer")
def _(args: Any) -> None:
    objects.pop(args.executable, None)


@function("LoadedExecutable_IsDeleted", "executable:pointer", "deleted:bool")
def _(args: Any) -> None:
    args.deleted = args.executable not in objects


@function("Executable_Name", "executable:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", objects[args.executable].module.name)


@function("Executable_NumReplicas", "executable:pointer", "count:size")
def _(args: Any) -> None:
    args.count = objects[args.executable].shape[0]


@function("Executable_NumPartitions", "executable:pointer", "count:size")
def _(args: Any) -> None:
    args.count = objects[args.executable].shape[1]


@function("Executable_NumOutputs", "executable:pointer", "count:size")
def _(args: Any) -> None:
    args.count = len(objects[args.executable].outputs)


@function("Executable_OutputElementTypes", "executable:pointer", "types:pointer", "count:size")
def _(args: Any) -> None:
    outputs = objects[args.executable].outputs
    args.count = len(outputs)
    numbers = [NUMBERS[np.dtype(output.numpy_dtype())] for output in outputs]
    args.types = give_array(("types", args.executable), ctypes.c_int, numbers)


@function("Executable_OutputDimensions", "executable:pointer", "count:size", "dims:pointer", "ranks:pointer")
def _(args: Any) -> None:
    dims = [output.dimensions() for output in objects[args.executable].outputs]
    args.count = len(dims)
    args.dims = give_array(("dims", args.executable), ctypes.c_int64, [size for each in dims for size in each])
    args.ranks = give_array(("ranks", args.executable), ctypes.c_size_t, [len(each) for each in dims])


@function("Executable_OutputMemoryKinds", "executable:pointer", "count:size", "kinds:pointer", "sizes:pointer")
def _(args: Any) -> None:
    args.count = len(objects[args.executable].outputs)
    kind = give_array("memory kind", ctypes.c_char, list(b"device"))
    args.kinds = give_array(("kinds", args.executable), ctypes.c_void_p, [kind] * args.count)
    args.sizes = give_array(("sizes", args.executable), ctypes.c_size_t, [6] * args.count)


@function(
    "LoadedExecutable_Execute",
    *("executable:pointer", "options:pointer", "arguments:pointer", "devices:size", "count:size"),
    *("outputs:pointer", "events:pointer", "device:pointer"),
)
def _(args: Any) -> None:
    here, loaded = local(), objects[args.executable].loaded
    assert args.devices == len(here)
    rows = read_array(ctypes.c_void_p, args.arguments, args.devices)
    given = [[objects[each].array for each in read_array(ctypes.c_void_p, row, args.count)] for row in rows]
    # of each argument the shards of this process's devices; what is donated in the program is not reused here
    result = loaded.execute_sharded([list(shards) for shards in zip(*given, strict=True)])
    arrays = result.disassemble_into_single_device_arrays()
    jax.block_until_ready(arrays)
    for place, (device, row) in enumerate(
        zip(here, read_array(ctypes.c_void_p, args.outputs, args.devices), strict=True)
    ):
        out = (ctypes.c_void_p * max(1, len(arrays))).from_address(row)
        for number, shards in enumerate(arrays):
            out[number] = handle(Buffer(shards[place], device))
        if args.events:
            (ctypes.c_void_p * args.devices).from_address(args.events)[place] = handle("event")
