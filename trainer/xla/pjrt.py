"""PJRT's C interface: reads and changes the table of functions that a plugin such as libtpu hands to torch_xla.

A plugin is a library with one function, `GetPjrtApi`, which returns the address of a static table of functions. Every
function takes the address of a structure of its own and returns an error, or null. torch_xla calls through the table,
and so calls a replaced entry.

Source: xla/pjrt/c/pjrt_c_api.h, major version 0, in which the table and each structure only grow at their ends. The
structures below are those of 0.71.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from typing import Any

_MAJOR, _LEAST_MINOR = 0, 71  # Executable_DeserializeAndLoad takes the options of a compile since 0.71
_WORD = ctypes.sizeof(ctypes.c_void_p)

Function: Any = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)  # releases Python's lock while it runs
_Void: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # of functions on errors, which return none


class PjrtError(RuntimeError):
    """The plugin refused a call, or its interface is unknown."""


def _structure(name: str, *fields: str, numbers: Sequence[str] = ()) -> Any:
    """A structure: two fields of all, then ``fields`` (sizes if so named, else pointers) and 32-bit ``numbers``."""
    fields = ("struct_size", "extension_start", *fields)
    body = [(field, ctypes.c_size_t if field.endswith("size") else ctypes.c_void_p) for field in fields]
    return type(name, (ctypes.Structure,), {"_fields_": [*body, *((field, ctypes.c_int) for field in numbers)]})


# the beginning of the table; the functions follow
_Head = _structure("_Head", "version_size", "version_extension_start", numbers=("major", "minor"))
# a program to compile; its format is ``hlo`` or ``mlir``
Program = _structure("Program", "code", "code_size", "format", "format_size")
_SERIALIZED = ("data", "data_size", "holder", "deleter")
# function → its place in the table, and the structure of its arguments
FUNCTIONS: dict[str, tuple[int, Any]] = {
    name: (place, _structure(name, *fields))
    for name, place, fields in (
        ("Error_Destroy", 0, ("error",)),
        ("Error_Message", 1, ("error", "text", "text_size")),
        ("Client_PlatformName", 12, ("client", "text", "text_size")),
        ("Client_PlatformVersion", 14, ("client", "text", "text_size")),
        ("Client_AddressableDevices", 16, ("client", "devices", "devices_size")),
        ("Client_Compile", 20, ("client", "program", "options", "options_size", "loaded")),
        ("Device_MemoryStats", 34, ("device", "in_use_size", "peak_size", *(f"other_{n}" for n in range(19)))),
        ("Executable_Destroy", 40, ("executable",)),
        ("Executable_Serialize", 49, ("executable", *_SERIALIZED)),
        ("LoadedExecutable_GetExecutable", 51, ("loaded", "executable")),
        ("Executable_DeserializeAndLoad", 56, ("client", "data", "data_size", "loaded", "options", "options_size")),
        ("TopologyDescription_Serialize", 87, ("topology", *_SERIALIZED)),
        ("Client_TopologyDescription", 95, ("client", "topology")),
    )
} | {"Client_ProcessIndex": (13, _structure("Client_ProcessIndex", "client", numbers=("index",)))}


class Table:
    """The table of the plugin in ``library``.

    Raises:
        OSError: there is no such library.
        PjrtError: it is no plugin, or one of another version of the interface.
    """

    def __init__(self, library: str) -> None:
        loaded = ctypes.CDLL(library)
        if not hasattr(loaded, "GetPjrtApi"):
            raise PjrtError(f"{library} has no GetPjrtApi")
        loaded.GetPjrtApi.restype = ctypes.c_void_p
        self._address: int = loaded.GetPjrtApi()
        head = _Head.from_address(self._address)
        self.version = (head.major, head.minor)
        needed = ctypes.sizeof(_Head) + _WORD * (1 + max(place for place, _ in FUNCTIONS.values()))
        if head.major != _MAJOR or head.minor < _LEAST_MINOR or head.struct_size < needed:
            found = f"version {head.major}.{head.minor} of PJRT's interface, in {head.struct_size} bytes"
            raise PjrtError(f"{library} has {found}: {_MAJOR}.{_LEAST_MINOR} or a later {_MAJOR}.x is known")

    def entry(self, place: int) -> int:
        return ctypes.c_size_t.from_address(self._address_of(place)).value

    def has(self, place: int) -> bool:
        """Whether the plugin implements the function there."""
        end = self._address + _Head.from_address(self._address).struct_size
        return self._address_of(place) < end and self.entry(place) != 0

    def replace(self, place: int, function: Any) -> None:
        """Puts ``function``, which the caller keeps, into the table; raises PjrtError if that can't be written."""
        address = self._address_of(place)
        start = address // mmap.PAGESIZE * mmap.PAGESIZE
        libc = ctypes.CDLL(None, use_errno=True)
        # a linker may have put the table into memory that only the loader writes
        size, access = ctypes.c_size_t(address + _WORD - start), mmap.PROT_READ | mmap.PROT_WRITE
        if libc.mprotect(ctypes.c_void_p(start), size, access):
            raise PjrtError(f"the plugin's table can't be written: {os.strerror(ctypes.get_errno())}")
        ctypes.c_size_t.from_address(address).value = ctypes.cast(function, ctypes.c_void_p).value or 0

    def call(self, name: str, /, **given: Any) -> Any:
        """The structure of a function's arguments after the call; raises PjrtError with the plugin's own message."""
        arguments, error = self._call(Function, name, given)
        if error:
            raise PjrtError(self.message(error))
        return arguments

    def message(self, error: int) -> str:
        """The text of an error, which ends with this."""
        text = text_of(self._call(_Void, "Error_Message", {"error": error})[0])
        self._call(_Void, "Error_Destroy", {"error": error})
        return text

    def _call(self, kind: Any, name: str, given: dict[str, Any]) -> tuple[Any, int | None]:
        place, structure = FUNCTIONS[name]
        arguments = structure(struct_size=ctypes.sizeof(structure), **given)
        return arguments, kind(self.entry(place))(ctypes.addressof(arguments))

    def serialize(self, name: str, /, **given: Any) -> bytes:
        found = self.call(name, **given)
        try:
            return ctypes.string_at(found.data, found.data_size)
        finally:
            _Void(found.deleter)(found.holder)

    def _address_of(self, place: int) -> int:
        return self._address + ctypes.sizeof(_Head) + _WORD * place


def text_of(arguments: Any) -> str:
    return ctypes.string_at(arguments.text, arguments.text_size).decode(errors="replace")
