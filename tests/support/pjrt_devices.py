"""Devices of several processes for torch_xla: jax's CPU client, whose processes are joined by gloo, as a PJRT plugin.

torch_xla's own CPU client has one process. jax's has as many as `jax.distributed.initialize` brings together, and its
collectives cross them. Here torch_xla's calls (compile, execute, put, get) are passed on to it, so a program runs on
N processes as it runs on N hosts of a pod: each has its own devices, sees those of the others, and all compile and
execute the same program.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import libtpu
import ml_dtypes
import numpy as np

# semi-private: jaxlib/xla_client.py (_xla is jaxlib/_jax.so), jaxlib 0.7.1
from jax._src.lib import xla_client
from torch_xla.experimental import plugins

from tests.support import pjrt_table
from tests.support.pjrt_table import function, give_array, give_bytes, give_text, handle, objects, read_array

KIND = "HOSTS"
# numbers of PJRT_Buffer_Type
_TYPES = dict(
    enumerate(
        (
            *(np.bool_, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64),
            *(np.float16, np.float32, np.float64, ml_dtypes.bfloat16, np.complex64, np.complex128),
        ),
        start=1,
    )
)
_NUMBERS = {np.dtype(kind): number for number, kind in _TYPES.items()}


@dataclass(eq=False)
class Device:
    number: int
    jax: Any

    @property
    def here(self) -> bool:
        return self.jax.process_index == jax.process_index()

    @cached_property
    def handle(self) -> int:
        return handle(self)

    @cached_property
    def memory(self) -> int | None:
        return handle(self) if self.here else None


@dataclass(eq=False)
class Buffer:
    array: Any
    device: Device
    deleted: bool = False
    dims: Any = field(init=False)

    def __post_init__(self) -> None:
        self.dims = (ctypes.c_int64 * max(1, self.array.ndim))(*self.array.shape)
        self.rank, self.dtype = self.array.ndim, np.dtype(self.array.dtype)


devices: list[Device] = []


def local() -> list[Device]:
    return [device for device in devices if device.here]


# ---- client, devices, memories ----


@function(
    "Client_Create",
    *("options:pointer", "count:size", "get:pointer", "get_arg:pointer", "put:pointer", "put_arg:pointer"),
    "client:pointer",
)
def _(args: Any) -> None:
    devices[:] = [Device(number, device) for number, device in enumerate(jax.devices())]
    args.client = handle("client")


@function("Client_Destroy", "client:pointer")
def _(args: Any) -> None:
    pass


@function("TopologyDescription_PlatformName", "topology:pointer", "text:pointer", "text_size:size")
@function("Client_PlatformName", "client:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", KIND.lower())


@function("TopologyDescription_PlatformVersion", "topology:pointer", "text:pointer", "text_size:size")
@function("Client_PlatformVersion", "client:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", f"jax {jax.__version__}")


@function("Client_TopologyDescription", "client:pointer", "topology:pointer")
def _(args: Any) -> None:
    args.topology = args.client


@function("TopologyDescription_Attributes", "topology:pointer", "attributes:pointer", "count:size")
def _(args: Any) -> None:
    args.count, args.attributes = 0, None


@function("TopologyDescription_GetDeviceDescriptions", "topology:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    args.count = len(devices)
    args.found = give_array("devices", ctypes.c_void_p, [device.handle for device in devices])


@function(
    "TopologyDescription_Serialize",
    *("topology:pointer", "data:pointer", "size:size", "holder:pointer", "deleter:pointer"),
)
def _(args: Any) -> None:
    give_bytes(args, repr([(device.number, device.jax.process_index) for device in devices]).encode())


@function("Client_ProcessIndex", "client:pointer", "index:int")
def _(args: Any) -> None:
    args.index = jax.process_index()


@function("Client_Devices", "client:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    args.count = len(devices)
    args.found = give_array("devices", ctypes.c_void_p, [device.handle for device in devices])


@function("Client_AddressableDevices", "client:pointer", "found:pointer", "count:size")
@function("LoadedExecutable_AddressableDevices", "client:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    args.count = len(local())
    args.found = give_array("local devices", ctypes.c_void_p, [device.handle for device in local()])


@function("Client_AddressableMemories", "client:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    args.count = len(local())
    args.found = give_array("memories", ctypes.c_void_p, [device.memory for device in local()])


@function("Client_LookupDevice", "client:pointer", "number:int", "device:pointer")
def _(args: Any) -> None:
    args.device = devices[args.number].handle


@function("Client_LookupAddressableDevice", "client:pointer", "number:int", "device:pointer")
def _(args: Any) -> None:
    args.device = local()[args.number].handle


@function("Device_GetDescription", "device:pointer", "description:pointer")
def _(args: Any) -> None:
    args.description = args.device


@function("DeviceDescription_Id", "device:pointer", "number:int")
def _(args: Any) -> None:
    args.number = objects[args.device].number


@function("DeviceDescription_ProcessIndex", "device:pointer", "index:int")
def _(args: Any) -> None:
    args.index = objects[args.device].jax.process_index


@function("DeviceDescription_Attributes", "device:pointer", "count:size", "attributes:pointer")
def _(args: Any) -> None:
    args.count, args.attributes = 0, None


@function("DeviceDescription_Kind", "device:pointer", "text:pointer", "text_size:size")
@function("DeviceDescription_DebugString", "device:pointer", "text:pointer", "text_size:size")
@function("DeviceDescription_ToString", "device:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", f"{KIND.lower()} device {objects[args.device].number}")


@function("Device_IsAddressable", "device:pointer", "here:bool")
def _(args: Any) -> None:
    args.here = objects[args.device].here


@function("Device_LocalHardwareId", "device:pointer", "number:int")
def _(args: Any) -> None:
    device = objects[args.device]
    args.number = local().index(device) if device.here else -1


@function("Device_AddressableMemories", "device:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    memory = objects[args.device].memory
    args.count = int(memory is not None)
    args.found = give_array(("memories of", args.device), ctypes.c_void_p, [memory])


@function("Device_DefaultMemory", "device:pointer", "memory:pointer")
def _(args: Any) -> None:
    args.memory = objects[args.device].memory


@function("Memory_Id", "memory:pointer", "number:int")
def _(args: Any) -> None:
    args.number = objects[args.memory].number


@function("Memory_Kind_Id", "memory:pointer", "number:int")
def _(args: Any) -> None:
    args.number = 0


@function("Memory_Kind", "memory:pointer", "text:pointer", "text_size:size")
@function("Memory_DebugString", "memory:pointer", "text:pointer", "text_size:size")
@function("Memory_ToString", "memory:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", "device")


@function("Memory_AddressableByDevices", "memory:pointer", "found:pointer", "count:size")
def _(args: Any) -> None:
    args.count = 1
    args.found = give_array(("devices of", args.memory), ctypes.c_void_p, [objects[args.memory].handle])


# ---- programs ----


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
    numbers = [_NUMBERS[np.dtype(output.numpy_dtype())] for output in outputs]
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


# ---- buffers ----


@function(
    "Client_BufferFromHostBuffer",
    *(
        "client:pointer",
        "data:pointer",
        "type:int",
        "dims:pointer",
        "rank:size",
        "strides:pointer",
        "stride_count:size",
    ),
    *("semantics:int", "device:pointer", "memory:pointer", "layout:pointer", "event:pointer", "buffer:pointer"),
)
def _(args: Any) -> None:
    dims, dtype = read_array(ctypes.c_int64, args.dims, args.rank), np.dtype(_TYPES[args.type])
    strides = read_array(ctypes.c_int64, args.strides, args.stride_count) or None
    values = np.zeros(dims, dtype)
    if values.size:
        extent = values.nbytes
        if strides is not None:
            extent = dtype.itemsize + sum((size - 1) * step for size, step in zip(dims, strides, strict=True))
        raw: Any = (ctypes.c_char * extent).from_address(args.data)
        values = np.ndarray(dims, dtype, buffer=raw, strides=strides).copy(order="C")
    device = objects[args.memory or args.device]
    args.buffer = handle(Buffer(device.jax.client.buffer_from_pyval(values, device.jax), device))
    args.event = handle("event")


@function("Buffer_ToHostBuffer", "buffer:pointer", "layout:pointer", "data:pointer", "size:size", "event:pointer")
def _(args: Any) -> None:
    array = objects[args.buffer].array
    if not args.data:
        args.size = array.nbytes
        return
    values = np.ascontiguousarray(np.asarray(array))
    ctypes.memmove(args.data, values.ctypes.data, values.nbytes)
    args.event = handle("event")


@function("Buffer_Destroy", "buffer:pointer")
def _(args: Any) -> None:
    objects.pop(args.buffer, None)


@function("Buffer_Delete", "buffer:pointer")
def _(args: Any) -> None:
    buffer = objects[args.buffer]
    buffer.deleted, buffer.array = True, None


@function("Buffer_IsDeleted", "buffer:pointer", "deleted:bool")
def _(args: Any) -> None:
    args.deleted = objects[args.buffer].deleted


@function("Buffer_ElementType", "buffer:pointer", "type:int")
def _(args: Any) -> None:
    args.type = _NUMBERS[objects[args.buffer].dtype]


@function("Buffer_Dimensions", "buffer:pointer", "dims:pointer", "rank:size")
@function("Buffer_UnpaddedDimensions", "buffer:pointer", "dims:pointer", "rank:size")
def _(args: Any) -> None:
    buffer = objects[args.buffer]
    args.dims, args.rank = ctypes.addressof(buffer.dims), buffer.rank


@function("Buffer_DynamicDimensionIndices", "buffer:pointer", "dims:pointer", "count:size")
def _(args: Any) -> None:
    args.dims, args.count = None, 0


@function("Buffer_OnDeviceSizeInBytes", "buffer:pointer", "size:size")
def _(args: Any) -> None:
    buffer = objects[args.buffer]
    args.size = math.prod(buffer.dims[: buffer.rank]) * buffer.dtype.itemsize


@function("Buffer_Device", "buffer:pointer", "device:pointer")
def _(args: Any) -> None:
    args.device = objects[args.buffer].device.handle


@function("Buffer_Memory", "buffer:pointer", "memory:pointer")
def _(args: Any) -> None:
    args.memory = objects[args.buffer].device.memory


@function("Buffer_IsOnCpu", "buffer:pointer", "is_on_cpu:bool")
def _(args: Any) -> None:
    args.is_on_cpu = False


@function("Buffer_ReadyEvent", "buffer:pointer", "event:pointer")
def _(args: Any) -> None:
    args.event = handle("event")


class Plugin(plugins.DevicePlugin):
    """What torch_xla asks of a plugin."""

    def library_path(self) -> str:
        return libtpu.get_library_path()


def install() -> None:
    """From now on ``PJRT_DEVICE=HOSTS`` names the devices of jax's client."""
    pjrt_table.install()
    plugins.use_dynamic_plugins()
    plugins.register_plugin(KIND, Plugin())
