"""Compiled programs, kept between the processes of a run: a restart loads them.

torch_xla 2.9 keeps compiled programs too, but can't load them with a plugin such as libtpu (pytorch/xla#9094). So the
plugin's function that compiles is replaced in its table (`shardwright.xla.pjrt`) by :meth:`KeptPrograms._compile`,
which first looks for a file, and has the plugin load it.

A file's name is a hash of code, options, devices, and the compiler with its flags, as in jax's compilation cache for
libtpu (jax/_src/cache_key.py, jax 0.7.1). The hosts of a job share one file a program, and the first writes it.
"""

import ctypes
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardwright.errors import UserError
from shardwright.files.cache import cache_root
from shardwright.files.folder import Folder
from shardwright.xla.pjrt import FUNCTIONS, Function, PjrtError, Program, Table, text_of

COMPILED = "SHARDWRIGHT_COMPILED"  # a folder that all hosts see; empty: nothing is kept
_FLAGS = ("LIBTPU_INIT_ARGS", "XLA_FLAGS")  # read by the compiler beside its options
_MAGIC = b"shardwright program 1\n"


class KeptPrograms:
    """The kept programs of this process. Failures to keep or load one are reported, and it is compiled."""

    def __init__(self) -> None:
        self.programs = self.loaded = 0  # that the plugin was asked for, and of these that were not compiled
        self._client: int | None = None  # known once it compiles
        self._place: _Place | None = None  # known once the plugin's devices are
        self._notices: dict[str, str] = {}  # subject → its first message
        self._reported: set[str] = set()
        self._reported_counts = (0, 0)
        self._table: Any = None
        self._original: Any = None
        self._replacement: Any = None  # must live as long as it can be called

    def install(self, table: Table) -> None:
        """Keeps the programs of the plugin with that table from now on."""
        if os.environ.get(COMPILED) == "":
            return
        place, _ = FUNCTIONS["Client_Compile"]
        self._original, self._replacement = Function(table.entry(place)), Function(self._compile)
        try:
            table.replace(place, self._replacement)
            self._table = table
        except PjrtError as error:
            self._notices["plugin"] = f"programs are not kept: {error}"

    def news(self) -> Iterator[str]:
        """Lines not reported before: the number of programs, and failures."""
        if self._place is not None and self._reported_counts != (self.programs, self.loaded):
            self._reported_counts = (self.programs, self.loaded)
            yield f"compile: {self.programs} programs, {self.loaded} loaded from {self._place.folder}"
        for subject in self._notices.keys() - self._reported:
            self._reported.add(subject)
            yield f"         {self._notices[subject]}"

    def most_memory(self) -> int | None:
        """The most bytes that this process's first device has had in use; None where the plugin doesn't count them."""
        if self._client is None:
            return None
        try:
            devices = self._table.call("Client_AddressableDevices", client=self._client).devices
            device = ctypes.c_size_t.from_address(devices).value
            return int(self._table.call("Device_MemoryStats", device=device).peak_size)
        except PjrtError:
            return None

    def _compile(self, address: int) -> int | None:
        """The plugin's function in its table: takes the address of its arguments, and returns its error."""
        self.programs += 1
        arguments = FUNCTIONS["Client_Compile"][1].from_address(address)
        self._client = arguments.client
        key = ""
        try:
            place = self._place = self._place or _find_place(self._table, arguments.client)
            key = _key(place.compiler, arguments)
            loaded = self._load(place.folder, key, arguments)
        except BaseException as error:  # raised into C it would be lost, and the result taken for a program
            self._notice(error)
            loaded = None
        if loaded is not None:
            arguments.loaded = loaded
            self.loaded += 1
            return None
        failed = self._original(address)
        if not failed and key and place.writes:
            try:
                self._keep(place.folder, key, arguments.loaded)
            except BaseException as error:
                self._notice(error)
        return failed

    def _load(self, folder: Folder, key: str, arguments: Any) -> int | None:
        """The handle of the program kept as ``key``; None if there is none that the plugin can load."""
        if not folder.exists(key):
            return None
        content = folder.read(key)
        program = content[len(_MAGIC) + hashlib.sha256().digest_size :]
        if not content.startswith(_head(key, program)):
            self._notices[key] = f"{folder}/{key} is damaged, and compiled again"
            return None
        given = {name: getattr(arguments, name) for name in ("client", "options", "options_size")}
        given |= {"data": ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p), "data_size": len(program)}
        try:
            return self._table.call("Executable_DeserializeAndLoad", **given).loaded
        except PjrtError as error:
            self._notices[key] = f"{folder}/{key} can't be loaded, and is compiled again: {error}"
            return None

    def _keep(self, folder: Folder, key: str, loaded: int) -> None:
        table = self._table
        executable = table.call("LoadedExecutable_GetExecutable", loaded=loaded).executable
        try:
            content = table.serialize("Executable_Serialize", executable=executable)
        finally:
            table.call("Executable_Destroy", executable=executable)
        folder.write(key, _head(key, content) + content)

    def _notice(self, error: BaseException) -> None:
        found = f"{error.asked}: {error.found}" if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
        self._notices.setdefault("folder", f"compiled programs can't be kept, and the run goes on: {found}")


@dataclass(frozen=True)
class _Place:
    """The folder of programs, whether this process writes there, and the parts of keys common to all."""

    folder: Folder
    writes: bool
    compiler: list[bytes]


def _find_place(table: Table, client: int) -> _Place:
    """The folder in COMPILED, filled by the first host; else one in this host's own cache."""
    topology = table.call("Client_TopologyDescription", client=client).topology
    compiler = [
        repr(table.version).encode(),
        text_of(table.call("Client_PlatformName", client=client)).encode(),
        text_of(table.call("Client_PlatformVersion", client=client)).encode(),
        table.serialize("TopologyDescription_Serialize", topology=topology),
        *(os.environ.get(name, "").encode() for name in _FLAGS),
    ]
    index, shared = table.call("Client_ProcessIndex", client=client).index, os.environ.get(COMPILED)
    folder = Folder(shared or cache_root() / "programs" / str(index))
    return _Place(folder, not shared or index == 0, compiler)


def _key(compiler: list[bytes], arguments: Any) -> str:
    from shardwright.models.ops.jax_call import xla_client  # loads jax, which few processes need

    program = Program.from_address(arguments.program)
    form = ctypes.string_at(program.format, program.format_size)
    code = ctypes.string_at(program.code, program.code_size)
    if form == b"hlo":
        # protobuf writes a map's entries in an order that differs by process; this does not
        code = xla_client.XlaComputation(code).as_serialized_hlo_module_proto()
    options = xla_client.CompileOptions.ParseFromString(ctypes.string_at(arguments.options, arguments.options_size))
    found = hashlib.sha256()
    for part in (*compiler, form, code, options.SerializeAsString()):
        found.update(len(part).to_bytes(8, "little") + part)
    return found.hexdigest()


def _head(key: str, program: bytes) -> bytes:
    return _MAGIC + hashlib.sha256(key.encode() + program).digest()


KEPT = KeptPrograms()
