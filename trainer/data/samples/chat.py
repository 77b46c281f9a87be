"""Chats: the messages of records, in the form that chat templates take."""

import contextlib
import inspect
import itertools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from shardwright.arguments.data_options import ROLE_OF
from shardwright.data.records.fields import SAYS, is_empty
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.masks import silenced
from shardwright.errors import a_type

Message = dict[str, Any]
ASSISTANT = "assistant"
ROLES = {"system", "developer", "user", ASSISTANT, "tool"}
_KEY_OF = {"from": "role", "value": "content"}
# what a record may not set of the renderer's own arguments
_OWN = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}


@dataclass(frozen=True)
class Chat:
    """A conversation.

    Attributes:
        first: the number of the first message that may be trained on.
        options: values for the template (``chat_template_kwargs``).
        silent: the numbers of the messages that say that they are not to be trained on.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    first: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    silent: frozenset[int] = frozenset()

    @property
    def turns(self) -> list[int]:
        """The numbers of the messages to train on; never the very first, which answers nothing."""
        return [i for i, m in enumerate(self.messages) if m["role"] == ASSISTANT and i >= max(self.first, 1)]


def chat_of(values: Mapping[str, Any], answer: str = "completion") -> Chat:
    """The chat in a record's ``messages``, ``conversations``, or ``prompt`` and ``answer``; raises BadRecord."""
    tools = (_list("tools", values["tools"], none=True) or None) if values.get("tools") else None
    system = values.get("system") or ""
    if not isinstance(system, str):
        raise BadRecord("system", f"{a_type(system)}, not text")
    column = next(name for name in ("prompt", "messages", "conversations") if name in values)
    messages = _messages(column, values[column])
    if system and messages[:1] != [{"role": "system", "content": system}]:
        if messages and messages[0]["role"] == "system":
            raise BadRecord("system", f"another text than its first message, which is a system's, in {column}")
        messages.insert(0, {"role": "system", "content": system})
    first = len(messages) if column == "prompt" else 0
    if column == "prompt":
        messages += _messages(answer, values.get(answer))
    return Chat(messages, tools, first, _template_options(values), silenced(messages, first))


def _template_options(values: Mapping[str, Any]) -> dict[str, Any]:
    """The record's ``chat_template_kwargs``, an object or the JSON of one; raises BadRecord."""
    name, options = "chat_template_kwargs", values.get("chat_template_kwargs") or {}
    with contextlib.suppress(ValueError):
        options = json.loads(options) if isinstance(options, str) else options
    if not isinstance(options, dict):
        raise BadRecord(name, f"{a_type(options)}, not an object")
    if taken := sorted(_OWN & options.keys()):
        raise BadRecord(name, f"{', '.join(taken)}, which a run says and no record")
    return options


def past_turns(history: Any) -> list[Message]:
    """The messages of an instruction's ``history``, a list of what was asked and answered; raises BadRecord."""
    turns = _list("history", history, none=True) if history else []
    if any(not isinstance(turn, list) or [type(text) for text in turn] != [str, str] for turn in turns):
        raise BadRecord("history", "something other than pairs of what was asked and what was answered")
    return [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", ASSISTANT), turn, strict=True)
    ]


def with_prompt(values: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    """A record of ``answers``, all strings or all messages, with a ``prompt``: its own, else what they have in common.

    This is their beginning, as trl cuts it. Where strings part, a space before belongs to both. Where an answer ends,
    its last letter or message is not common. Raises BadRecord if there is nothing before.
    """
    are_texts = isinstance(values[answers[0]], str)
    if isinstance(values.get("prompt"), str if are_texts else list):
        return dict(values)
    given: dict[str, Any] = {name: values[name] if are_texts else _list(name, values[name]) for name in answers}
    first, shortest = given[answers[0]], min(map(len, given.values()))
    same = (all(each == one for each in others) for one, *others in zip(*given.values(), strict=False))
    common = sum(itertools.takewhile(bool, same))
    prompt = first[: min(common, shortest - 1)]
    if are_texts and common < shortest:
        prompt = prompt.removesuffix(" ")
    if not prompt:
        found = "none, and the answers have no common beginning"
        raise BadRecord("prompt", found, instead="--columns prompt=NAME, the column of what they answer")
    return {**values, "prompt": prompt, **{name: each[len(prompt) :] for name, each in given.items()}}


def with_last(values: Mapping[str, Any]) -> dict[str, Any]:
    """A record of ``messages`` whose last one is the ``completion`` behind a ``prompt``; raises BadRecord if alone."""
    *asked, last = _list("messages", values["messages"])
    if not asked:
        raise BadRecord("messages", "a single one, which answers nothing")
    return {**{k: v for k, v in values.items() if k != "messages"}, "prompt": asked, "completion": [last]}


def _list(column: str, value: Any, none: bool = False) -> list[Any]:
    """A list, or the JSON of one; ``none``: it may be empty. Raises BadRecord."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRecord(column, f"a string that is no JSON: {error}") from error
    if isinstance(value, dict) and not value.keys().isdisjoint({"role", "from"}):
        value = [value]  # a message alone
    if not isinstance(value, list) or not (value or none):
        raise BadRecord(column, f"{'nothing' if value in (None, [], {}) else type(value).__name__}, not a list")
    return value


def _messages(column: str, value: Any) -> list[Message]:
    return [_message(column, i, message) for i, message in enumerate(_list(column, value), start=1)]


def _message(column: str, number: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRecord(column, f"message {number} is {a_type(value)}, not a role and its content")
    message: Message = {str(_KEY_OF.get(key, key)): inner for key, inner in value.items()}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadRecord(column, f"message {number} has no role")
    message["role"] = role = ROLE_OF.get(role, role)
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in parts):
        raise BadRecord(column, f"message {number} ({role}) has a part that is no text")
    if not isinstance(content, str | list | None):
        raise BadRecord(column, f"the content of message {number} ({role}) is {a_type(content)}, not text")
    empty = not parts if isinstance(content, list) else not (content or "").strip()
    if empty and all(is_empty(message.get(key)) for key in SAYS) and role in ("user", ASSISTANT):
        raise BadRecord(column, f"message {number} ({role}) is empty")
    if message.get("tool_calls"):
        message["tool_calls"] = _list(column, message["tool_calls"], none=True)
        for call in message["tool_calls"]:
            _check_call(column, number, call)
    return message


def _check_call(column: str, number: int, call: Any) -> None:
    if not isinstance(call, dict):
        raise BadRecord(column, f"a tool call of message {number} is {a_type(call)}, not an object")
    inner = call.get("function", call)
    if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
        try:
            json.loads(inner["arguments"])
        except ValueError as error:
            raise BadRecord(column, f"the arguments of a tool call of message {number} are no JSON: {error}") from error
