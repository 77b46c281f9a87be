"""Pickles read as plain data: nothing that a pickle names is imported, called or changed.

A pickle is a program. Of its instructions those are carried out that make numbers, texts, tuples, lists and dicts;
where it would make an object, a :class:`Made` says of which name and of what. Time and memory are linear in its size.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any


class Name(str):
    """The dotted name of a class or function that a pickle names."""


class Made:
    """What a pickle would make: ``kind(*arguments)``, with ``state`` set on it.

    It is compared by identity, so that no key of a dict costs more than another.
    """

    __slots__ = ("arguments", "kind", "state")

    def __init__(self, kind: Name, arguments: Any) -> None:
        self.kind, self.arguments, self.state = kind, arguments, None


def read_pickle(data: bytes, names: Collection[str]) -> Any:
    """Returns the value of a pickle, in which objects are :class:`Made` and a persistent id is its own value.

    Args:
        names: the dotted names that the pickle may hold.

    Raises:
        ValueError: it is no pickle, holds another name, or an instruction that plain data have no need of.
    """
    try:
        return _PlainUnpickler(data, names).load()
    except _OtherName as error:
        raise ValueError(str(error)) from None
    except Exception as error:  # of many types: bytes that are no pickle fail in any of its instructions
        raise ValueError(f"no pickle of plain data: {type(error).__name__}") from None


class _OtherName(Exception):
    """A name that the pickle may not hold."""


# the instructions that are carried out as they stand
_PLAIN = (
    *(pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.STACK_GLOBAL, pickle.BINPERSID),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1),
    *(pickle.SHORT_BINUNICODE, pickle.BINUNICODE, pickle.BINUNICODE8),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3, pickle.TUPLE),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT),
    *(pickle.MEMOIZE, pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
)


# semi-private: the pickle module's own reader in Python, its table of instructions and its stack; Python 3.11 to 3.13.
# The one in C keeps what it has seen in an array, which one instruction makes 64 GiB long.
_Unpickler: Any = pickle._Unpickler  # type: ignore[attr-defined]


class _PlainUnpickler(_Unpickler):
    def __init__(self, data: bytes, names: Collection[str]) -> None:
        super().__init__(io.BytesIO(data))
        self.names = names

    def find_class(self, module: str, name: str) -> Name:
        found = Name(f"{module}.{name}")
        if found not in self.names:
            raise _OtherName(f"it names {found[:80]!r}, which has no place there")
        return found

    def persistent_load(self, key: Any) -> Any:
        return key

    def make(self) -> None:
        arguments, kind = self.stack.pop(), self.stack.pop()
        if type(kind) is not Name or type(arguments) is not tuple:
            raise TypeError("no name to make an object of")
        self.stack.append(Made(kind, arguments))

    def build(self) -> None:
        state, made = self.stack.pop(), self.stack[-1]
        if type(made) is not Made or made.state is not None:
            raise TypeError("no new object to set the state of")
        made.state = state

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_in(self.stack[-1], [key, value])

    def set_items(self) -> None:
        items = self.pop_mark()
        self.set_in(self.stack[-1], items)

    def set_in(self, into: Any, items: list[Any]) -> None:
        for key in items[::2]:
            if type(into) is not dict or type(key) not in (str, Made):  # the hash of nested tuples may take for ever
                raise TypeError("no dict of names")
        into.update(zip(items[::2], items[1::2], strict=True))

    dispatch = {code[0]: _Unpickler.dispatch[code[0]] for code in _PLAIN} | {
        pickle.NEWOBJ[0]: make,
        pickle.REDUCE[0]: make,
        pickle.BUILD[0]: build,
        pickle.SETITEM[0]: set_item,
        pickle.SETITEMS[0]: set_items,
    }
