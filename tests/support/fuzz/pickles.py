"""Pickles as trees that can be edited, and back as pickles that no pickler would write.

In a tree `{"!": name, "args": …, "state": …}` is an object, `{"()": […]}` a tuple, `{"{}": [[key, value], …]}` a dict,
`{"@": …}` a persistent id, and `{"%": "hexadecimal"}` any instructions.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any

from shardwright.checkpoint.plain_pickle import Made, Name
from tests.support.fuzz.edits import WICKED


def _bomb(levels: int) -> str:
    """Instructions of a tuple that holds itself twice, ``levels`` deep: small, and 2**levels long to hash."""
    code = pickle.EMPTY_TUPLE
    for i in range(1000, 1000 + levels):
        code += pickle.LONG_BINPUT + struct.pack("<I", i) + pickle.LONG_BINGET + struct.pack("<I", i) + pickle.TUPLE2
    return code.hex()


_DCP = "torch.distributed.checkpoint.metadata."
EVIL = [
    *WICKED,
    *({"()": []}, {"()": [1, 2]}, {"()": [10**18, 10**18]}, {"()": [0, 10**18]}, {"()": [-1, 2]}, {"()": ["x"]}),
    *({"{}": []}, {"{}": [["x", 1]]}, {"%": _bomb(70)}, {"{}": [[{"%": _bomb(70)}, 1]]}, {"()": [{"%": _bomb(70)}]}),
    {"%": (pickle.NONE + pickle.LONG_BINPUT + b"\xff\xff\xff\x7f").hex()},
    {"%": (pickle.BINUNICODE8 + b"\xff" * 7 + b"\x0f").hex()},
    {"%": (pickle.FRAME + b"\xff" * 7 + b"\x0f").hex()},
    {"%": (pickle.BINBYTES8 + b"\xff" * 7 + b"\x0f").hex()},
    {"%": (pickle.LONG4 + b"\xff\xff\xff\x7f").hex()},
    {"!": "os.mkdir", "args": {"()": ["pwned"]}, "state": None},
    {"!": "builtins.eval", "args": {"()": ["open('pwned', 'w')"]}, "state": None},
    {"!": "builtins.getattr", "args": {"()": [{"%": ""}, "x"]}, "state": None},
    {"!": _DCP + "Metadata", "args": None, "state": {"()": [None, {"{}": [["__init__", 1], ["__eq__", 2]]}]}},
    {"!": "torch.Size", "args": {"()": [{"()": [10**18]}]}, "state": None},
    {"!": _DCP + "BytesStorageMetadata", "args": {"()": []}, "state": None},
    *({"!": name, "args": None, "state": None} for name in ("torch.float64", "torch.uint8", "torch.bool", "os.system")),
]  # "args": None: the name itself, so that "state" is set on a class


def as_tree(value: Any) -> Any:
    """The tree of what `read_pickle` read."""
    if isinstance(value, Made):
        return {"!": str(value.kind), "args": as_tree(value.arguments), "state": as_tree(value.state)}
    if isinstance(value, Name):
        return {"!": str(value), "args": None, "state": None}
    if isinstance(value, tuple):
        return {"()": [as_tree(part) for part in value]}
    if isinstance(value, dict):
        return {"{}": [[as_tree(key), as_tree(part)] for key, part in value.items()]}
    return [as_tree(part) for part in value] if isinstance(value, list) else value


def as_pickle(tree: Any) -> bytes:
    """The pickle of a tree."""
    return pickle.PROTO + b"\x04" + _code(tree) + pickle.STOP


def _code(tree: Any) -> bytes:
    if isinstance(tree, dict):
        return _special(tree)
    if isinstance(tree, list):
        return pickle.EMPTY_LIST + pickle.MARK + b"".join(map(_code, tree)) + pickle.APPENDS
    if isinstance(tree, str):
        return _text(tree)
    if isinstance(tree, float):
        return pickle.BINFLOAT + struct.pack(">d", tree)
    if isinstance(tree, bool) or tree is None:
        return {True: pickle.NEWTRUE, False: pickle.NEWFALSE, None: pickle.NONE}[tree]
    data = tree.to_bytes(tree.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(data)]) + data


def _special(tree: dict[str, Any]) -> bytes:
    if isinstance(tree.get("!"), str):
        module, _, name = tree["!"].rpartition(".")
        code = _text(module) + _text(name) + pickle.STACK_GLOBAL
        if tree.get("args") is not None:
            code += _code(tree["args"]) + pickle.REDUCE
        if tree.get("state") is not None:
            code += _code(tree["state"]) + pickle.BUILD
        return code
    if isinstance(tree.get("%"), str):
        return bytes.fromhex(tree["%"]) if set(tree["%"]) <= set("0123456789abcdef") else b""
    if isinstance(tree.get("()"), list):
        return pickle.MARK + b"".join(map(_code, tree["()"])) + pickle.TUPLE
    if "@" in tree:
        return _code(tree["@"]) + pickle.BINPERSID
    pairs = tree["{}"] if isinstance(tree.get("{}"), list) else [[k, v] for k, v in tree.items()]
    items = b"".join(_code(part) for pair in pairs for part in (pair if isinstance(pair, list) else [pair]))
    return pickle.EMPTY_DICT + pickle.MARK + items + pickle.SETITEMS


def _text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return pickle.BINUNICODE + struct.pack("<I", len(data)) + data
