"""The reader of checkpoints of format 1, which are no longer written, and the migration of the oldest of them.

Their tensors are in the format of `torch.distributed.checkpoint` (DCP): `.metadata`, a pickle, lists them, and each
shard lies in a `.distcp` file as `torch.save` wrote it. torch's own readers aren't asked: its weights-only unpickler
refuses pickles of protocol 4, and `torch.load` makes a tensor as large as a record claims of whatever memory follows.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import IO, Any

from shardwright.checkpoint.lineage import folder_of, live_steps
from shardwright.checkpoint.manifest import METADATA, is_whole, mark
from shardwright.checkpoint.tensors import Piece, StoredTensors, read_index
from shardwright.files.folder import Folder, suppress_damage
from shardwright.files.safetensors_file import NAMES

_AROUND = 64 << 10  # bytes; a record has some 1,500 beside its values
_HEAD = 4096  # bytes in which its values begin
_DTYPES = {str(dtype): name for dtype, name in NAMES.items()}
# in a ZIP archive, the entry of a tensor's values, not compressed; the length of its padding follows that of its name
_VALUES = re.compile(rb"PK\x03\x04.{4}\x00\x00.{16}\x0e\x00(..)archive/data/0", re.DOTALL)


def migrate(folder: Folder, host: dict[str, Any], arguments: dict[str, Any], state: dict[str, Any]) -> None:
    """Adds fields that old versions lack to a checkpoint's `host.json`, `training_args.json`, `trainer_state.json`."""
    arguments.setdefault("optim", "adamw")  # there was no other
    sizes = ("per_device_train_batch_size", "gradient_accumulation_steps")
    host.setdefault("asked_batch", [arguments.get(name) for name in sizes])  # a run never had another
    if "lineage" in host:
        return
    home, live = folder.parent, []
    with suppress_damage():
        live = live_steps(home)
    earlier = [step for step in live if step < host["step"]] if host["step"] in live else []
    host["lineage"] = {str(step): mark(folder_of(home, step)) for step in earlier}
    # the path of the best checkpoint was noted, and the folder may have been moved since
    name = (state.get("best_model_checkpoint") or "").rstrip("/").rpartition("/")[2]
    if name and is_whole(home / name):
        state["best_model_checkpoint"] = name


def open_tensors(folder: Folder, files: Mapping[str, int]) -> StoredTensors:
    return StoredTensors(folder, METADATA, lambda data: read_index(_index(data), files, _AROUND), _values_begin)


def _values_begin(file: IO[bytes], piece: Piece, count: int) -> int:
    """The place in ``file`` at which the ``count`` bytes of a record's values begin."""
    file.seek(piece.begin)
    found = _VALUES.search(file.read(min(_HEAD, piece.length)))
    begin = found.end() + int.from_bytes(found[1], "little") if found else piece.length
    if begin + count > piece.length:
        raise ValueError("no tensor where the list says")
    return piece.begin + begin


def _index(data: bytes) -> dict[str, Any]:
    """Translate `.metadata` into the index of format 2."""
    fields = _ListReader(io.BytesIO(data)).load().state
    places = {_key(index.state["fqn"], index.state["offset"]): at.state for index, at in fields["storage_data"].items()}
    index = {}
    for name, made in fields["state_dict_metadata"].items():
        pieces = []
        for chunk in (chunk.state for chunk in made.state["chunks"]):
            place = places[_key(name, chunk["offsets"])]
            piece = {"file": place["relative_path"], "begin": place["offset"], "length": place["length"]}
            pieces.append(piece | {"offsets": _size(chunk["offsets"]), "shape": _size(chunk["sizes"])})
        dtype = _DTYPES[made.state["properties"].state[0].name]
        index[name] = {"dtype": dtype, "shape": _size(made.state["size"]), "pieces": pieces}
    return index


def _key(name: Any, offsets: Any) -> tuple[str, tuple[int, ...]]:
    if type(name) is not str:
        raise TypeError("a name that is no text")
    return name, tuple(_size(offsets))


def _size(made: Any) -> list[int]:
    (numbers,) = made.arguments
    if type(numbers) is not tuple or any(type(number) is not int for number in numbers):
        raise TypeError("a size that is none")
    return list(numbers)


# ---- pickles, read as plain data: nothing that one names is imported, called or changed ----


@dataclass(eq=False)  # compared by identity, so that no key of a dict costs more than another
class _Made:
    """A placeholder for a class or function that a pickle names, and for the object that it would make."""

    name: str
    arguments: tuple[Any, ...] = ()
    state: Any = None

    def __call__(self, *arguments: Any) -> _Made:
        return _Made(self.name, arguments)

    def __setstate__(self, state: Any) -> None:
        self.state = state


# semi-private: the pickle module's own reader in Python, and its table of instructions; Python 3.11 to 3.13.
# The one in C keeps what it has seen in an array, which one instruction makes 64 GiB long.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL),
    *(pickle.REDUCE, pickle.BUILD),  # there is nothing else to call, or to set the state of
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


class _ListReader(_Unpickler):
    """Reads a pickle in time and memory that are linear in its size; any other instruction is a KeyError."""

    def find_class(self, module: str, name: str) -> _Made:
        return _Made(f"{module}.{name}")

    def set_item(self) -> None:
        self.set_all([self.stack.pop(), self.stack.pop()][::-1])

    def set_items(self) -> None:
        self.set_all(self.pop_mark())

    def set_all(self, items: list[Any]) -> None:
        # the hash of nested tuples may take for ever
        if type(self.stack[-1]) is not dict or any(type(key) not in (str, _Made) for key in items[::2]):
            raise TypeError("no dict of names")
        self.stack[-1].update(zip(items[::2], items[1::2], strict=True))

    dispatch = {code[0]: _Unpickler.dispatch[code[0]] for code in _PLAIN} | {
        pickle.NEWOBJ[0]: _Unpickler.load_reduce,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }
