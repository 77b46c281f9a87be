"""Ablation: the fields of a chat without which its template renders the very same text."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shardwright.data.records.fields import is_empty, named
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.chat import Chat
from shardwright.data.samples.template import Template

# characters for private use, which stand in no text: a field's mark takes the place of a letter of it
_MARKS = range(0xF0000, 0x10FFFE)
_LONG = 16  # characters; a shorter content may stand in the template's own words
_IDS = ("id", "tool_call_id")  # templates look for one in another message, by equality
_LAST_LETTER = re.compile(r"\w(?=\W*$)")
Field = tuple[int, str]  # (a message's number, its key); -1: a column beside the messages; -2: a key of its options


def unread_fields(
    chat: Chat, whole: str, template: Template, alone: Sequence[int] = (), end: int | None = None
) -> list[str]:
    """Fields with a value that have no effect on ``whole``, the chat's text, as :func:`named` writes them.

    Nor on the texts that end with the turns ``alone``, which are samples of their own. ``end``: the whole is no sample,
    and no field is named of that message and of later ones.

    Seldom more than three renderings: each field bears a mark, all at once, and those that are not seen are left out,
    all at once. Only if that changes the text, they are halved.
    """
    contents = [message.get("content") for message in chat.messages]
    plain = all(message.keys() <= {"role", "content"} for message in chat.messages) and not (chat.tools or chat.options)
    if plain and _in_order(contents, whole):
        return []
    # options may have an effect on the beginning of an answer alone
    begun, asked = (template.text, [chat.first]) if template.marked(chat) else (template.begun, chat.turns)
    asked = [turn for turn in asked if turn and chat.options]

    def render(changed: Chat) -> str:
        texts = [template.ended(changed, turn) for turn in alone] + [begun(changed, turn) for turn in asked]
        return "".join([template.whole(changed) if end is None else "", *texts])

    whole = render(chat) if alone or asked else whole
    fields = _fields(chat)
    marks = dict(zip(fields, map(chr, _MARKS), strict=False))
    marked = _changed(chat, lambda field, value: value if field[1] in _IDS else _marked(value, marks.get(field)))
    seen = _rendered(marked, render) or ""

    def without_effect(left: Sequence[Field]) -> Sequence[Field]:
        dropped = {*left}
        gone = _changed(chat, lambda field, value: None if field in dropped else value)
        if not left or _rendered(gone, render) == whole:
            return left
        middle = len(left) // 2
        return [*without_effect(left[:middle]), *without_effect(left[middle:])] if middle else []

    unread = without_effect([field for field in fields if marks.get(field) is None or marks[field] not in seen])
    return [_name(field, fields[field]) for field in unread if end is None or field[0] < end]


def _fields(chat: Chat) -> dict[Field, Any]:
    fields = {(i, key): value for i, message in enumerate(chat.messages) for key, value in message.items()}
    fields |= {(-1, "tools"): chat.tools, **{(-2, key): value for key, value in chat.options.items()}}
    return {field: value for field, value in fields.items() if field[1] != "role" and not is_empty(value)}


def _name(field: Field, value: Any) -> str:
    number, key = field
    return named({-1: "", -2: "chat_template_kwargs."}.get(number, "messages.") + key, value)


def _changed(chat: Chat, change: Callable[[Field, Any], Any]) -> Chat:
    """The chat with each field's value as ``change`` makes it; a None is left out."""
    messages = [_kept({key: change((i, key), value) for key, value in m.items()}) for i, m in enumerate(chat.messages)]
    options = _kept({key: change((-2, key), value) for key, value in chat.options.items()})
    return replace(chat, messages=messages, tools=change((-1, "tools"), chat.tools), options=options)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _marked(value: Any, mark: str | None) -> Any:
    """``value`` with the mark in each of its strings, which keep their lengths, but in those that name a type."""
    if mark is None:
        return value
    if isinstance(value, str):
        return _LAST_LETTER.sub(mark, value, count=1)
    if isinstance(value, list):
        return [_marked(inner, mark) for inner in value]
    if isinstance(value, dict):
        return {key: inner if key in ("type", *_IDS) else _marked(inner, mark) for key, inner in value.items()}
    return value


def _rendered(chat: Chat, render: Callable[[Chat], str]) -> str | None:
    try:
        return render(chat)
    except BadRecord:
        return None


def _in_order(contents: Sequence[Any], whole: str) -> bool:
    """Whether ``whole`` has all of them, each long enough to be no word of the template."""
    at = 0
    for content in contents:
        text = content.strip() if isinstance(content, str) else ""
        at = whole.find(text, at) + len(text)
        if len(text) < _LONG or at < len(text):
            return False
    return True
