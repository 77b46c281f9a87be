"""Ablation: the fields of a chat without which its template renders the very same text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from shardwright.data.records.fields import is_empty, named
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.chat import Chat
from shardwright.data.samples.template import Template

# characters for private use, which stand in no text: a part's mark takes the place of a letter of it
_MARKS = range(0xF0001, 0x10FFFE)
_NUMBERS = 7 * 10**14  # with a mark added, it takes the place of a number
_NUMBER = re.compile(r"7000000\d{8}")
_LONG = 16  # characters; a shorter content may stand in the template's own words
# keys whose values templates compare, with words or with each other: marked in a rendering of their own
_RESULT = "tool_call_id"
_COMPARED: dict[Any, int] = {"type": 1, "id": 1, _RESULT: 2}
_KNOWN = 1024  # tools whose parts are known
_TOOLS, _OPTIONS = -1, -2
# (a message's number, or one of these two, and a key) of a field; of a part of its value, the keys and places as well
Part = tuple[Any, ...]


@dataclass(frozen=True)
class _Trial:
    """A chat, rendered with its ``parts`` marked or left out, beside its text as it is."""

    chat: Chat
    parts: Mapping[Part, Any]
    render: Callable[[Chat], str]
    whole: str

    def read(self) -> Set[Part]:
        """The parts whose marks are seen in the text, and all that they are parts of."""
        kinds: dict[int, list[Part]] = {}
        for part in self.parts:
            kinds.setdefault(_COMPARED.get(part[-1], 0), []).append(part)
        found = (part for own in kinds.values() for part in self._seen(dict(zip(own, _MARKS, strict=False))))
        return {part[:length] for part in found for length in range(2, len(part) + 1)}

    def _seen(self, marks: Mapping[Part, int]) -> Iterator[Part]:
        def mark(inner: Any, place: Part) -> Any:
            return _marked(inner, place, marks)

        text = self._rendered(lambda field, value: _rebuilt(value, field, leaf=mark)) or ""
        letters, numbers = {*text}, {*map(int, _NUMBER.findall(text))}
        return (part for part, mark in marks.items() if chr(mark) in letters or _NUMBERS + mark in numbers)

    def without_effect(self, left: Sequence[Part]) -> list[Part]:
        """The parts in ``left`` without which the text is the same; of each other part, such parts within it."""
        if not left:
            return []
        dropped, fields = {*left}, {part[:2] for part in left}
        text = self._rendered(lambda field, value: _rebuilt(value, field, dropped) if field in fields else value)
        if text == self.whole:
            return [*left]
        if len(left) == 1:
            return self.without_effect([part for part in self.parts if _above(part) == left[0]])
        middle = len(left) // 2
        return [*self.without_effect(left[:middle]), *self.without_effect(left[middle:])]

    def _rendered(self, change: Callable[[Part, Any], Any]) -> str | None:
        """The text with each field's value as ``change`` makes it; None where the template refuses that."""
        try:
            return self.render(_changed(self.chat, change))
        except BadRecord:
            return None


def unread_fields(
    chat: Chat,
    whole: str,
    template: Template,
    known: dict[str, list[str]],
    alone: Sequence[int] = (),
    end: int | None = None,
) -> list[str]:
    """Fields with a value that have no effect on ``whole``, the chat's text, as :func:`named` writes them.

    Nor on the texts that end with the turns ``alone``, which are samples of their own. ``end``: the whole is no sample,
    and no field is named of that message and of later ones.

    Of a value that has an effect, such as calls and tools, each part without one is named by its keys.

    Seldom more than three renderings: each part bears a mark, all at once, and those that are not seen are left out,
    all at once. Only if that changes the text, they are halved. ``known``: tools, in JSON, whose parts were tried, and
    the names of those without effect.
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

    def within_tools(part: Part) -> bool:
        return part[0] == _TOOLS and len(part) > 2

    tools = json.dumps(chat.tools) if chat.tools else ""
    parts = {part: value for part, value in _parts_of(chat) if not (tools in known and within_tools(part))}
    trial = _Trial(chat, parts, render, render(chat) if alone or asked else whole)
    read = trial.read()
    highest = [part for part in parts if part not in read and (len(part) == 2 or _above(part) in read)]
    # a result's id is never left out with its call's: without both they are equal too
    results = [part for part in highest if part[-1] == _RESULT]
    # those of one name side by side, since most often all of them have an effect, or none has
    others = sorted((part for part in highest if part[-1] != _RESULT), key=_name)
    unread = {part: named(_name(part), parts[part]) for own in (results, others) for part in trial.without_effect(own)}
    inner = [name for part, name in unread.items() if within_tools(part)]
    if tools and (_TOOLS, "tools") not in unread:
        if len(known) > _KNOWN:
            known.clear()
        inner = known.setdefault(tools, inner)
    outer = [name for part, name in unread.items() if not within_tools(part) and (end is None or part[0] < end)]
    return [*outer, *inner]


def unread_of_contents(chat: Chat) -> list[str]:
    """Named as by :func:`unread_fields`: keys beside the texts of which a content is made, which are never read."""
    contents = [m["content"] for m in chat.messages if isinstance(m.get("content"), list)]
    beside = [item for parts in contents for part in parts for item in part.items() if item[0] not in ("type", "text")]
    return [named(f"messages.content.{key}", value) for key, value in beside if not is_empty(value)]


def _parts_of(chat: Chat) -> Iterator[tuple[Part, Any]]:
    """All fields that hold something, and the parts of their values that have a key."""
    fields = {(i, key): value for i, message in enumerate(chat.messages) for key, value in message.items()}
    fields |= {(_TOOLS, "tools"): chat.tools, **{(_OPTIONS, key): value for key, value in chat.options.items()}}
    for field, value in fields.items():
        if field[1] != "role" and not is_empty(value):
            yield from [(field, value)] if field[1] == "content" else _parts(field, value)


def _parts(place: Part, value: Any) -> Iterator[tuple[Part, Any]]:
    if isinstance(place[-1], str):
        yield place, value
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        if isinstance(inner, dict | list) or isinstance(value, dict):
            yield from _parts((*place, key), inner) if not is_empty(inner) else ()


def _above(part: Part) -> Part:
    """The part that it is one of."""
    above = part[:-1]
    return above if len(above) < 2 or isinstance(above[-1], str) else _above(above)


def _name(part: Part) -> str:
    number, *keys = part
    words = {_TOOLS: [], _OPTIONS: ["chat_template_kwargs"]}.get(number, ["messages"])
    for key in keys:
        if words[-2:] == ["arguments", "*"]:
            break
        if isinstance(key, str):  # names that people gave are left out
            words = [*words, "*" if words and words[-1] in ("arguments", "properties") else key]
    return ".".join(words)


def _changed(chat: Chat, change: Callable[[Part, Any], Any]) -> Chat:
    """The chat with each field's value as ``change`` makes it; a None is left out."""
    messages = [_kept({key: change((i, key), value) for key, value in m.items()}) for i, m in enumerate(chat.messages)]
    options = _kept({key: change((_OPTIONS, key), value) for key, value in chat.options.items()})
    return replace(chat, messages=messages, tools=change((_TOOLS, "tools"), chat.tools), options=options)


def _kept(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def _marked(value: Any, place: Part, marks: Mapping[Part, int]) -> Any:
    """``value`` with the mark of the part that it belongs to: in a string, whose length stays, or for a number."""
    parts = (place[:length] for length in range(len(place), 1, -1))
    mark = marks.get(next((part for part in parts if part in marks or part[-1] in _COMPARED), place))
    if mark is None or not (value or "arguments" in place):  # what is false may stay so
        return value
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(_NUMBERS + mark)
    text = str(value)
    at = next((n for n in reversed(range(len(text))) if text[n].isalnum()), None)
    return value if at is None else text[:at] + chr(mark) + text[at + 1 :]


def _rebuilt(
    value: Any,
    place: Part,
    dropped: Set[Part] = frozenset(),
    leaf: Callable[[Any, Part], Any] = lambda value, place: value,
) -> Any:
    """``value`` without the parts ``dropped``, and each inmost value as ``leaf`` makes it; None if it is dropped."""
    if place in dropped:
        return None
    if isinstance(value, list):
        return [_rebuilt(inner, (*place, n), dropped, leaf) for n, inner in enumerate(value)]
    if isinstance(value, dict):
        places = {key: (*place, key) for key in value}
        return {key: _rebuilt(value[key], at, dropped, leaf) for key, at in places.items() if at not in dropped}
    return leaf(value, place)


def _in_order(contents: Sequence[Any], whole: str) -> bool:
    """Whether ``whole`` has all of them, each long enough to be no word of the template."""
    at = 0
    for content in contents:
        text = content.strip() if isinstance(content, str) else ""
        at = whole.find(text, at) + len(text)
        if len(text) < _LONG or at < len(text):
            return False
    return True
