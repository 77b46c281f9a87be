"""Devices of several processes for torch_xla: jax's CPU client, whose processes are joined by gloo, as a PJRT plugin.

torch_xla's own CPU client has one process. jax's has as many as `jax.distributed.initialize` brings together, and its
collectives cross them. Here torch_xla's calls (compile, execute, put, get) are passed on to it, so a program runs on
N processes as it runs on N hosts of a pod: each has its own devices, sees those of the others, and all compile and
execute the same program. Here are the client, its devices and buffers; programs are in `tests.support.pjrt_programs`.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import libtpu
import ml_dtypes
import numpy as np

# semi-private: jaxlib/xla_client.py (_xla is jaxlib/_jax.so), jaxlib 0.7.1
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
NUMBERS = {np.dtype(kind): number for number, kind in _TYPES.items()}


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
    args.type = NUMBERS[objects[args.buffer].dtype]


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
    from tests.support import pjrt_programs  # noqa: F401 - its functions enter the table too

    pjrt_table.install()
    plugins.use_dynamic_plugins()
    plugins.register_plugin(KIND, Plugin())
