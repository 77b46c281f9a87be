"""PJRT's C interface from Python: a table of functions that torch_xla loads as it loads libtpu's.

torch_xla asks a library for `GetPjrtApi`, which returns a table of functions. libtpu's own is used: its library lies
here for the TPU compiler, and its table is of the version that torch_xla 2.9 was built for. Every function in it is
replaced by a Python one, so no line of libtpu runs. The layout is that of xla/pjrt/c/pjrt_c_api.h, version 0.75.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import libtpu

# in the table's order
_NAMES = """
Error_Destroy Error_Message Error_GetCode Plugin_Initialize Plugin_Attributes Event_Destroy Event_IsReady
Event_Error Event_Await Event_OnReady Client_Create Client_Destroy Client_PlatformName Client_ProcessIndex
Client_PlatformVersion Client_Devices Client_AddressableDevices Client_LookupDevice Client_LookupAddressableDevice
Client_AddressableMemories Client_Compile Client_DefaultDeviceAssignment Client_BufferFromHostBuffer
DeviceDescription_Id DeviceDescription_ProcessIndex DeviceDescription_Attributes DeviceDescription_Kind
DeviceDescription_DebugString DeviceDescription_ToString Device_GetDescription Device_IsAddressable
Device_LocalHardwareId Device_AddressableMemories Device_DefaultMemory Device_MemoryStats Memory_Id Memory_Kind
Memory_DebugString Memory_ToString Memory_AddressableByDevices Executable_Destroy Executable_Name
Executable_NumReplicas Executable_NumPartitions Executable_NumOutputs Executable_SizeOfGeneratedCodeInBytes
Executable_GetCostAnalysis Executable_OutputMemoryKinds Executable_OptimizedProgram Executable_Serialize
LoadedExecutable_Destroy LoadedExecutable_GetExecutable LoadedExecutable_AddressableDevices LoadedExecutable_Delete
LoadedExecutable_IsDeleted LoadedExecutable_Execute Executable_DeserializeAndLoad LoadedExecutable_Fingerprint
Buffer_Destroy Buffer_ElementType Buffer_Dimensions Buffer_UnpaddedDimensions Buffer_DynamicDimensionIndices
Buffer_GetMemoryLayout Buffer_OnDeviceSizeInBytes Buffer_Device Buffer_Memory Buffer_Delete Buffer_IsDeleted
Buffer_CopyToDevice Buffer_ToHostBuffer Buffer_IsOnCpu Buffer_ReadyEvent Buffer_UnsafePointer
Buffer_IncreaseExternalReferenceCount Buffer_DecreaseExternalReferenceCount Buffer_OpaqueDeviceMemoryDataPointer
CopyToDeviceStream_Destroy CopyToDeviceStream_AddChunk CopyToDeviceStream_TotalBytes CopyToDeviceStream_GranuleSize
CopyToDeviceStream_CurrentBytes TopologyDescription_Create TopologyDescription_Destroy
TopologyDescription_PlatformName TopologyDescription_PlatformVersion TopologyDescription_GetDeviceDescriptions
TopologyDescription_Serialize TopologyDescription_Attributes Compile Executable_OutputElementTypes
Executable_OutputDimensions Buffer_CopyToMemory Client_CreateViewOfDeviceBuffer Executable_Fingerprint
Client_TopologyDescription Executable_GetCompiledMemoryStats Memory_Kind_Id ExecuteContext_Create
ExecuteContext_Destroy Buffer_CopyRawToHost AsyncHostToDeviceTransferManager_Destroy
AsyncHostToDeviceTransferManager_TransferData Client_CreateBuffersForAsyncHostToDevice
AsyncHostToDeviceTransferManager_RetrieveBuffer AsyncHostToDeviceTransferManager_Device
AsyncHostToDeviceTransferManager_BufferCount AsyncHostToDeviceTransferManager_BufferSize
AsyncHostToDeviceTransferManager_SetBufferError AsyncHostToDeviceTransferManager_AddMetadata Client_DmaMap
Client_DmaUnmap Client_CreateUninitializedBuffer Client_UpdateGlobalProcessInfo TopologyDescription_Deserialize
"""
FUNCTIONS = _NAMES.split()
_HEAD = 5  # words before the first function: size, extensions, and the version, which is of three
_UNIMPLEMENTED, _INTERNAL = 12, 13
_KINDS = {
    "pointer": ctypes.c_void_p,
    "size": ctypes.c_size_t,
    "int": ctypes.c_int,
    "bool": ctypes.c_bool,
}
_Function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)

objects: dict[int, Any] = {}  # what a handle that was given out stands for
_numbers = itertools.count(1)
_kept: dict[Any, Any] = {}  # memory that what was given out points to
_table: dict[str, Any] = {}


def handle(thing: Any) -> int:
    """A number by which the caller names ``thing``."""
    number = next(_numbers) * 16  # as pointers are
    objects[number] = thing
    return number


def function(name: str, *fields: str) -> Callable[[Callable[[Any], None]], Callable[[Any], None]]:
    """Puts the decorated function into the table; it gets the arguments' structure, whose fields it may set.

    What it raises the caller gets as an error.

    Args:
        fields: ``name:kind`` of each field after the two that all structures begin with.
    """
    body = [(each, _KINDS[kind]) for each, kind in (field.split(":") for field in fields)]
    head = [("struct_size", ctypes.c_size_t), ("extension_start", ctypes.c_void_p)]
    structure: Any = type(name, (ctypes.Structure,), {"_fields_": [*head, *body]})

    def put(act: Callable[[Any], None]) -> Callable[[Any], None]:
        @_Function
        def call(address: int) -> int | None:
            try:
                act(structure.from_address(address))
                return None
            except Exception as error:
                return handle((_INTERNAL, f"{type(error).__name__}: {error}".encode()))

        _table[name] = call
        return act

    return put


def give_text(args: Any, field: str, text: str) -> None:
    """Sets a field and its size to ``text``."""
    raw = _kept.setdefault(text, ctypes.create_string_buffer(text.encode()))
    setattr(args, field, ctypes.addressof(raw))
    setattr(args, f"{field}_size", len(text.encode()))


def give_bytes(args: Any, content: bytes) -> None:
    """Sets ``data`` and ``size`` to ``content``, which stays until the caller has ``deleter`` called on ``holder``."""
    args.holder, args.size = handle(content), len(content)
    args.data = ctypes.cast(ctypes.c_char_p(content), ctypes.c_void_p).value
    args.deleter = ctypes.cast(_let_go, ctypes.c_void_p).value


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _let_go(holder: int) -> None:
    del objects[holder]


def give_array(key: Any, kind: Any, values: Sequence[Any]) -> int:
    """The address of an array that stays, under a key of its own."""
    if key not in _kept:
        _kept[key] = (kind * max(1, len(values)))(*values)
    return ctypes.addressof(_kept[key])


def read_array(kind: Any, address: int | None, count: int) -> list[Any]:
    """``count`` numbers at ``address``."""
    return list((kind * count).from_address(address)) if address and count else []


@function("Error_Destroy", "error:pointer")
def _(args: Any) -> None:
    objects.pop(args.error, None)


@function("Error_Message", "error:pointer", "text:pointer", "text_size:size")
def _(args: Any) -> None:
    give_text(args, "text", objects[args.error][1].decode())


@function("Error_GetCode", "error:pointer", "code:int")
def _(args: Any) -> None:
    args.code = objects[args.error][0]


@function("Plugin_Initialize")
def _(args: Any) -> None:
    pass


@function("Plugin_Attributes", "attributes:pointer", "count:size")
def _(args: Any) -> None:
    args.attributes, args.count = None, 0


# Events: a call returns once what it was asked for has happened, so every event has.
@function("Event_Destroy", "event:pointer")
def _(args: Any) -> None:
    objects.pop(args.event, None)


@function("Event_IsReady", "event:pointer", "is_ready:bool")
def _(args: Any) -> None:
    args.is_ready = True


@function("Event_Error", "event:pointer")
def _(args: Any) -> None:
    pass


@function("Event_Await", "event:pointer")
def _(args: Any) -> None:
    pass


@function("Event_OnReady", "event:pointer", "callback:pointer", "user_arg:pointer")
def _(args: Any) -> None:
    ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p)(args.callback)(None, args.user_arg)


def _missing(name: str) -> Any:
    @_Function
    def call(address: int) -> int:
        return handle((_UNIMPLEMENTED, f"PJRT_{name}, which the hosts' stand-in lacks".encode()))

    _table[name] = call
    return call


def install() -> None:
    """Puts the functions into the table that torch_xla will find."""
    library = ctypes.CDLL(libtpu.get_library_path())
    library.GetPjrtApi.restype = ctypes.c_void_p
    address = library.GetPjrtApi()
    size = ctypes.c_size_t.from_address(address).value
    words = (ctypes.c_size_t * (size // ctypes.sizeof(ctypes.c_size_t))).from_address(address)
    assert len(words) == _HEAD + len(FUNCTIONS), f"another version of PJRT's interface: {len(words)} words"
    words[1] = 0  # no extensions
    for place, name in enumerate(FUNCTIONS, _HEAD):
        words[place] = ctypes.cast(_table.get(name) or _missing(name), ctypes.c_void_p).value or 0
    nothing = ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0  # takes nothing and returns 0

    @atexit.register
    def _() -> None:  # what torch_xla destroys after Python's end finds nothing to do
        words[_HEAD:] = [nothing] * len(FUNCTIONS)
