"""Plugins newer than torch_xla: a table of functions that demands longer structures, one after another."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from shardwright.xla.pjrt import Function, PjrtError, Table
from shardwright.xla.pjrt_structures import LENGTHS, lengthen

HEAD, EXECUTE, OPTIONS = 5, 55, 80  # words before the first function; torch_xla's length of an execution's options
MESSAGE: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class Plugin:
    """A table whose functions note what they are given, and refuse a structure shorter than they want."""

    def __init__(self, lengths: dict[int, int], options: int = OPTIONS, version: tuple[int, int] = (0, 100)) -> None:
        self.calls: list[tuple[int, bytes, bytes]] = []
        self.texts: list[Any] = []
        self.words = (ctypes.c_size_t * (HEAD + 1 + max(LENGTHS)))()
        self.words[0] = ctypes.sizeof(self.words)
        (ctypes.c_int * 2).from_buffer(self.words, 32)[:] = version
        self.kept: list[Any] = [MESSAGE(lambda _: None), MESSAGE(self._message)]
        self.kept += [Function(self._function(place, lengths[place], options)) for place in sorted(lengths)]
        for place, function in enumerate(self.kept):
            self.words[HEAD + place] = ctypes.cast(function, ctypes.c_void_p).value or 0
        self.table = object.__new__(Table)  # without a library
        self.table._address, self.table.version = ctypes.addressof(self.words), version

    def _message(self, address: int) -> None:
        words = (ctypes.c_size_t * 5).from_address(address)
        words[3], words[4] = ctypes.addressof(self.texts[words[2] - 1]), len(self.texts[words[2] - 1].value)

    def _error(self, name: str, wanted: int, given: int) -> int:
        text = f"Unexpected {name} size: expected {wanted}, got {given}."
        self.texts.append(ctypes.create_string_buffer(text.encode()))
        return len(self.texts)

    def _function(self, place: int, wanted: int, options_wanted: int) -> Callable[[int], int | None]:
        def call(address: int) -> int | None:
            length, options = ctypes.c_size_t.from_address(address).value, b""
            if length < wanted:
                return self._error(f"PJRT_{place}_Args", wanted, length)
            if place == EXECUTE:
                at = ctypes.c_size_t.from_address(address + 24).value
                given = ctypes.c_size_t.from_address(at).value
                if given < options_wanted:
                    return self._error("PJRT_ExecuteOptions", options_wanted, given)
                options = ctypes.string_at(at, given)
            self.calls.append((place, ctypes.string_at(address, length), options))
            ctypes.c_size_t.from_address(address + 16).value = 77  # a result
            return None

        return call

    def call(self, place: int, words: Any) -> int | None:
        error: int | None = Function(self.table.entry(place))(ctypes.addressof(words))
        return error


def structure(length: int) -> Any:
    """A structure as torch_xla passes it, with a pattern in its fields."""
    words = (ctypes.c_ubyte * max(length, 32))(*[7] * max(length, 32))
    ctypes.c_size_t.from_buffer(words).value = length
    return words


@pytest.mark.parametrize("place", [place for place, length in LENGTHS.items() if length])
def test_a_longer_structure_of_any_function_is_made_of_a_shorter_one(place: int) -> None:
    known = LENGTHS[place]
    wanted = known + 24
    plugin = Plugin({**LENGTHS, place: wanted})
    assert len(kept := list(lengthen(plugin.table))) == 1, kept
    words, options = structure(known), structure(OPTIONS)
    if place == EXECUTE:
        ctypes.c_size_t.from_buffer(words, 24).value = ctypes.addressof(options)
    assert plugin.call(place, words) is None
    ((_, given, _),) = plugin.calls
    assert len(given) == wanted
    assert given[32:known] == bytes([7] * (known - 32))[: max(0, known - 32)]
    assert not any(given[known:])
    # the caller's structure has the result, and its own length
    assert ctypes.c_size_t.from_buffer(words).value == known
    if known >= 24:
        assert ctypes.c_size_t.from_buffer(words, 16).value == 77


@pytest.mark.parametrize("wanted", [88, 112, 120])
def test_an_executions_options_grow_too(wanted: int) -> None:
    plugin = Plugin(LENGTHS, options=wanted)
    kept = list(lengthen(plugin.table))
    words, options = structure(LENGTHS[EXECUTE]), structure(OPTIONS)
    place = ctypes.c_size_t.from_buffer(words, 24)
    place.value = ctypes.addressof(options)
    assert plugin.call(EXECUTE, words) is None
    assert len(kept) == 1
    ((_, _, given),) = plugin.calls
    assert given == wanted.to_bytes(8, "little") + bytes([7] * (OPTIONS - 8)) + bytes(wanted - OPTIONS)
    assert place.value == ctypes.addressof(options)
    assert ctypes.c_size_t.from_buffer(options).value == OPTIONS


def test_nothing_is_replaced_in_a_plugin_of_torch_xlas_time_or_with_the_same_structures() -> None:
    assert not list(lengthen(Plugin(LENGTHS, version=(0, 75)).table))
    assert not list(lengthen(Plugin(LENGTHS, version=(0, 90)).table))


def test_a_plugin_that_does_not_say_how_it_executes_is_refused_with_both_versions() -> None:
    plugin = Plugin(LENGTHS, version=(0, 300))
    plugin._error = lambda *_: plugin.texts.append(ctypes.create_string_buffer(b"no")) or len(plugin.texts)  # type: ignore[method-assign, func-returns-value]
    with pytest.raises(PjrtError, match=r"0\.300, which does not execute as 0\.75"):
        list(lengthen(plugin.table))
