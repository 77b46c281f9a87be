"""Mutations: small lists of edits, plain data, that change a tree of JSON-able values, or bytes, in wicked places."""

from __future__ import annotations

import copy
import json
from typing import Any, TypeAlias

from hypothesis import strategies as st

Edits: TypeAlias = list[tuple[int, str, Any, int]]  # (which node, what is done, with which value, which other node)
ByteEdits: TypeAlias = list[tuple[int, str, int]]  # (where, what is done, with which byte or count)

WICKED = [
    *(None, True, False, 0, 1, -1, 2, 3, 7, 255, 2**31, 2**32 - 1, 2**53 + 1, 2**63, 10**12, 10**18, -(10**18), 10**40),
    *(0.5, -1.5, 1e308, float("nan"), float("inf"), -float("inf")),
    *("", " ", "0", "-1", "nan", "../x", "../../host.json", "/etc/passwd", "/dev/zero", "fifo", "link", "folder", "."),
    *(
        "..",
        "\0",
        "a\0b",
        "\ud800",
        "é\n\x1b[31m",
        "[/y]",
        "x" * 5000,
        "host.json/x",
        "tokenizer",
        "tensors-1-0.safetensors",
    ),
    *([], {}, [[]], [0], [1, 2], [-1], ["x"], {"x": 1}, {"": {}}, [[[[[[[[1]]]]]]]], [None] * 40),
]
_numbers = st.integers(0, 10**6)
_ACTIONS = ["replace"] * 6 + ["number"] * 3 + ["delete", "delete", "double", "swap", "rename", "wrap", "many"]


NUMBERS = [0, 1, -1, 2, 3, 4, 5, 6, 7, 8, 12, 100, 1600]
NUMBERS += [2**27, 2**31, 2**63, 10**18, -(10**18), 10**40, 1.5, float("nan")]
MILD = ["number"] * 4 + ["delete", "double", "swap", "many"]  # what leaves most of a tree's forms as they are


def tree_edits(
    most: int = 3, least: int = 1, values: list[Any] = WICKED, actions: list[str] = _ACTIONS
) -> st.SearchStrategy[Edits]:
    """Lists of edits for :func:`edited`."""
    edit = st.tuples(_numbers, st.sampled_from(actions), st.sampled_from(values), _numbers)
    return st.lists(edit, min_size=least, max_size=most)


def byte_edits(most: int = 3, least: int = 1) -> st.SearchStrategy[ByteEdits]:
    """Lists of edits for :func:`edited_bytes`."""
    actions = ["flip", "flip", "set", "cut", "insert", "drop", "double"]
    edit = st.tuples(st.integers(0, 2**32), st.sampled_from(actions), st.integers(1, 255))
    return st.lists(edit, min_size=least, max_size=most)


def edited(tree: Any, edits: Edits) -> Any:
    """A copy of ``tree`` with the edits."""
    root = [copy.deepcopy(tree)]
    for at, action, value, other in edits:
        places = list(_places(root))
        if action == "number":
            action, value = "replace", NUMBERS[other % len(NUMBERS)]
            places = [(box, key) for box, key in places if type(box[key]) in (int, float)] or places
        box, key = places[at % len(places)]
        _edit(box, key, action, copy.deepcopy(value), places[other % len(places)])
        if not root:
            root.append(None)
    return root[0]


def _places(box: Any) -> Any:
    for key in list(box) if isinstance(box, dict) else range(len(box)):
        yield box, key
        if isinstance(box[key], dict | list):
            yield from _places(box[key])


def _edit(box: Any, key: Any, action: str, value: Any, other: tuple[Any, Any]) -> None:
    if action == "replace":
        box[key] = value
    elif action == "delete":
        del box[key]
    elif action == "double" and isinstance(box, list):
        box.insert(key, copy.deepcopy(box[key]))
    elif action == "rename" and isinstance(box, dict):
        box[value if isinstance(value, str) else repr(value)] = box.pop(key)
    elif action == "wrap":
        box[key] = [box[key]]
    elif action == "many" and isinstance(box, list):
        box[key:key] = [copy.deepcopy(box[key]) for _ in range(50)]
    else:  # swap, and what does not suit the box
        there, name = other
        box[key], there[name] = copy.deepcopy(there[name]), copy.deepcopy(box[key])


def edited_bytes(data: bytes, edits: ByteEdits) -> bytes:
    """``data`` with the edits."""
    for where, action, byte in edits:
        at = where % (len(data) + 1)
        before, here, after = data[:at], data[at : at + 1], data[at + 1 :]
        if action == "flip":
            data = before + bytes(b ^ byte for b in here) + after
        elif action == "set":
            data = before + bytes([byte]) + after
        elif action == "cut":
            data = before
        elif action == "insert":
            data = before + bytes([byte]) * byte + here + after
        elif action == "drop":
            data = before + data[at + byte :]
        else:
            data = before + data[at : at + byte] + here + after
    return data


def as_text(tree: Any, deep: bool = False) -> bytes:
    """``tree`` as JSON; ``deep``: as a text that nests deeper than any reader goes."""
    return b"[" * 100_000 if deep else json.dumps(tree).encode()
