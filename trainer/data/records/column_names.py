"""Columns that public datasets have under other names: the options that read them, as an error offers them."""

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from shardwright.objectives.objective import RecordShape

_ANSWER = ("response", "answer", "solution", "completion", "output", "summary", "long_answer")
_QUESTION = ("question", "query", "problem", "prompt", "instruction", "input", "dialogue", "document", "article")
# column → its names elsewhere, in small letters, likeliest first
_ELSEWHERE = {
    "instruction": _QUESTION,
    "prompt": _QUESTION,
    "output": _ANSWER,
    "completion": _ANSWER,
    "input": ("context",),
    "chosen": ("response_j",),
    "rejected": ("response_k",),
}
_TEXT = (
    *("content", "raw_content", "body", "document", "article", "passage", "story", "code", "whole_func_string"),
    *("chat", "conversation", "dialogue", "context", "answer", "response", "solution", "output"),
)
_TURNS = ("messages", "conversations", "prompt", "completion", "chosen", "rejected")  # which need no other name
_ALSO = ("input", "prompt")  # optional columns that are worth a name


def offered(columns: Mapping[str, Any], reads: Sequence[RecordShape]) -> str:
    """The options that read records with these columns (name → feature); empty where no name tells."""
    strings = {name.lower(): name for name, feature in columns.items() if is_string(feature)}
    turns = next((n for n, feature in columns.items() if n not in _TURNS and _holds_turns(feature)), None)
    if turns is not None and strings.keys().isdisjoint(_ANSWER) and any(shape.is_chat for shape in reads):
        return f"--columns messages={turns}"
    for shape in sorted(reads, key=lambda shape: "output" not in shape.required):  # the chat template's before others
        named = _named(strings, shape)
        if not shape.is_text and named.keys() >= {*shape.required}:
            others = ",".join(f"{name}={own}" for name, own in named.items() if name != own)
            return f"--columns {others}" if others else ""
    return ""


def offered_texts(columns: Mapping[str, Any], named: str | None) -> str:
    """The option that reads one of the columns as plain text; ``named``: what it named, which is none."""
    texts = [name for name, feature in columns.items() if is_string(feature)]
    texts.sort(key=lambda name: _TEXT.index(name.lower()) if name.lower() in _TEXT else len(_TEXT))
    near = difflib.get_close_matches(named or "", texts, n=1)
    return ", or ".join(f"--text_column {name}" for name in (near or texts)[:2])


def is_string(feature: Any) -> bool:
    return getattr(feature, "dtype", "") in ("string", "large_string")


def _named(strings: Mapping[str, str], shape: RecordShape) -> dict[str, str]:
    """Column of the shape → the one of ``strings`` (in small letters → as it is) that it may be, each used once."""
    found: dict[str, str] = {}
    for name in (*shape.required, *(each for each in _ALSO if each in shape.optional)):
        names = (name, *_ELSEWHERE.get(name, ()))
        own = next((strings[each] for each in names if each in strings and strings[each] not in found.values()), None)
        if own is not None:
            found[name] = own
    return found


def _holds_turns(feature: Any) -> bool:
    """Whether a column is a list of messages, by the keys of its items."""
    item = getattr(feature, "feature", None)
    return isinstance(item, Mapping) and (item.keys() >= {"role", "content"} or item.keys() >= {"from", "value"})
