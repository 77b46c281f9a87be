"""Structures of PJRT's C interface that a newer plugin wants longer than torch_xla 2.9 passes them.

Structures only grow at their ends, and zeros there ask for nothing. A plugin says itself how long it wants one: given
one of no length, it refuses it before it reads another field, and names the length. Between version 0.75, which
torch_xla 2.9 was built for, and 0.116, the newest on the package index (jax-cuda12-pjrt 0.12.0.1), two have grown:
the options of an execution (80 bytes; 88 since 0.76, 112 since 0.78) and the memory statistics of a program.
"""

import ctypes
import re
from collections.abc import Iterator
from typing import Any

from shardwright.xla.pjrt import Function, PjrtError, Table

BUILT_FOR = (0, 75)  # torch_xla 2.9's version of the interface
# The length in bytes of each function's structure in that version, in the table's order, from the third function on
# (the first two return no error). 0: such a function is not asked; one is deprecated, and one reads before it checks.
# Source: what jax-cuda12-pjrt 0.7.1 (0.75) answered, function by function.
_LENGTHS = """
28 16 32 24 25 24 24 40 88 24 40 28 40 40 40 40 40 40 56 48 120 28 28 40 40 40 40 32 25 28 40 32 185 28 40 40 40 40 24
40 32 32 32 32 40 48 32 56 24 32 40 24 25 80 64 0 24 28 40 40 40 104 32 32 32 24 25 40 56 25 32 32 24 24 32 24 40
32 32 32 56 24 40 40 40 56 40 64 40 48 40 0 40 32 56 28 24 24 56 24 72 72 40 32 32 40 48 40 40 32 80 40 40
"""
LENGTHS = {place: int(length) for place, length in enumerate(_LENGTHS.split(), start=2)}
_EXECUTE, _OPTIONS, _OPTIONS_AT, _OPTIONS_LENGTH = 55, "PJRT_ExecuteOptions", 24, 80
_WORD = ctypes.sizeof(ctypes.c_size_t)


def lengthen(table: Table) -> Iterator[Any]:
    """Makes a newer plugin take torch_xla's structures; yields the functions put into its table, which must be kept.

    Raises:
        PjrtError: the plugin does not say how long it wants the options of an execution.
    """
    if table.version <= BUILT_FOR:
        return
    for place, length in LENGTHS.items():
        if not length or not table.has(place):
            continue
        wanted, options = _wanted(table, place) or length, _OPTIONS_LENGTH
        if place == _EXECUTE:
            asked = _wanted(table, place, with_options=True)
            if asked is None:
                version, known = (".".join(map(str, pair)) for pair in (table.version, BUILT_FOR))
                raise PjrtError(f"the plugin's interface is {version}, which does not execute as {known}, torch_xla's")
            options = asked
        if wanted > length or options > _OPTIONS_LENGTH:
            longer = Function(_longer(Function(table.entry(place)), wanted, options))
            table.replace(place, longer)
            yield longer


def _wanted(table: Table, place: int, *, with_options: bool = False) -> int | None:
    """The length that the plugin wants of a function's structure, or of the options in it; None: it doesn't say."""
    given, options = (ctypes.c_size_t * 64)(), (ctypes.c_size_t * 64)()
    if with_options:
        given[0], given[_OPTIONS_AT // _WORD] = ctypes.sizeof(given), ctypes.addressof(options)
    error = Function(table.entry(place))(ctypes.addressof(given))
    # a function that the plugin lacks refuses any call, and says so to torch_xla too
    found = re.search(r"Unexpected (\w+) size: expected (\d+)", table.message(error) if error else "")
    return int(found[2]) if found is not None and with_options == (found[1] == _OPTIONS) else None


def _longer(original: Any, wanted: int, options_wanted: int) -> Any:
    """``original`` for callers whose structure, or the options in it, may be shorter than wanted."""

    def call(address: int) -> int | None:
        with_options = options_wanted > _OPTIONS_LENGTH
        place = ctypes.c_size_t.from_address(address + _OPTIONS_AT) if with_options else None
        options, shorter = (_copy(place.value, options_wanted), place.value) if place is not None else (None, 0)
        if place is not None and options is not None:
            place.value = ctypes.addressof(options)
        whole = _copy(address, wanted)
        error: int | None = original(address if whole is None else ctypes.addressof(whole))
        if whole is not None:  # results go back; the caller's own length stays
            length = ctypes.c_size_t.from_address(address).value
            ctypes.memmove(address + _WORD, ctypes.addressof(whole) + _WORD, length - _WORD)
        if place is not None:
            place.value = shorter
        return error

    return call


def _copy(address: int, wanted: int) -> Any:
    """The structure at ``address`` with zeros behind, and its new length; None if it is long enough."""
    length = ctypes.c_size_t.from_address(address).value
    if length >= wanted:
        return None
    copy = ctypes.create_string_buffer(wanted)
    ctypes.memmove(copy, address, length)
    ctypes.c_size_t.from_buffer(copy).value = wanted
    return copy
