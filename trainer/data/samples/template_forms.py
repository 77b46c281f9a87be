"""The forms in which a chat template takes contents, reasoning and the arguments of calls: each asked of it once."""

import functools
import json
from collections.abc import Mapping
from typing import Any, Protocol

from shardwright.data.records.shapes import BadRecord

Message = dict[str, Any]
_WORD, _NAME = "Zwanzig", "Dreissig"
_ASKED, _IN_PARTS = ({"role": "user", "content": content} for content in (_WORD, [{"type": "text", "text": _WORD}]))
_REASONING = ("reasoning_content", "thinking", "reasoning")  # transformers fills each template's from any
_OPENED, CLOSED = "<think>", "</think>"


class Render(Protocol):
    """Renders messages, and asks for an answer if ``prompts``; raises BadRecord where the template refuses them."""

    def __call__(self, made: list[Message], prompts: bool = False) -> str: ...


class TemplateForms:
    """The forms that a chat template takes: each is tried with ``render``."""

    def __init__(self, render: Render) -> None:
        self._render = render

    @functools.cached_property
    def in_parts(self) -> bool:
        """Contents are lists of parts, and no strings."""
        return not self._takes(_ASKED, word=_WORD) and self._takes(_IN_PARTS, word=_WORD)

    @functools.cached_property
    def in_json(self) -> bool:
        """Arguments are strings of JSON, and no objects."""
        return not self._takes(self._asked, _calling({"a": "b"})) and self._takes(self._asked, _calling('{"a": "b"}'))

    @functools.cached_property
    def calls(self) -> int:
        """The number of a message's calls that are written, of two."""
        for count in (2, 1):
            words = ({"a": f"{_NAME}{n}"} for n in range(count))
            try:
                made = self._render([self._asked, _calling(*map(json.dumps, words) if self.in_json else words)])
            except BadRecord:
                continue
            return sum(f"{_NAME}{n}" in made for n in range(count))
        return 0

    @functools.cached_property
    def bare(self) -> bool:
        """A message of calls may be without content, as transformers hands on one whose content is null."""
        calling = _calling(json.dumps({"a": "b"}) if self.in_json else {"a": "b"})
        return self._takes(self._asked, {key: value for key, value in calling.items() if key != "content"})

    @functools.cached_property
    def reasons_within(self) -> bool:
        """Reasoning is a part of the content, for which a generation prompt opens it, and no key of its own."""
        try:
            opened = self._render([self._asked], prompts=True).rstrip().endswith(_OPENED)
        except BadRecord:
            return False
        said = [{"type": "text", "text": "a"}] if self.in_parts else "a"
        key = {"role": "assistant", "content": said, _REASONING[0]: _NAME}
        return opened and not self._takes(self._asked, key, word=_NAME)

    def message(self, message: Message) -> Message:
        """The message in these forms. One without content has an empty one where the template does not take none."""
        content, made = text_of(message), dict(message)
        keys = [key for key in _REASONING if isinstance(message.get(key), str) and message[key].strip()]
        if keys and message["role"] == "assistant" and self.reasons_within and CLOSED not in content:
            content = f"{_OPENED}\n{made.pop(keys[0]).strip()}\n{CLOSED}\n\n{content}"
        made["content"] = [{"type": "text", "text": content}] if self.in_parts and content else content
        if message.get("tool_calls"):
            made["tool_calls"] = [self._called(call) for call in message["tool_calls"]]
            if not content and message.get("content") is None and self.bare:
                del made["content"]
        return made

    @property
    def _asked(self) -> Message:
        return _IN_PARTS if self.in_parts else _ASKED

    def _takes(self, *messages: Message, word: str = "") -> bool:
        try:
            return word in self._render([*messages])
        except BadRecord:
            return False

    def _called(self, call: Any) -> Any:
        """The call. APIs write its arguments as a string of JSON, and most templates take an object."""
        inner = call.get("function", call)
        given = inner.get("arguments") if isinstance(inner, dict) else None
        if isinstance(given, dict) and self.in_json:
            inner = {**inner, "arguments": json.dumps(given, ensure_ascii=False)}
        elif isinstance(given, str) and not self.in_json:
            inner = {**inner, "arguments": json.loads(given)}
        return {**call, "function": inner} if "function" in call else inner


def text_of(message: Mapping[str, Any]) -> str:
    """The content as a string: of parts, all that is written."""
    content = message.get("content") or ""
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def marked(value: Any, mark: str) -> Any:
    """``value`` with ``mark`` for each string that is not empty, but for roles and types."""
    if isinstance(value, str):
        return value and mark
    if isinstance(value, list):
        return [marked(inner, mark) for inner in value]
    if isinstance(value, dict):
        return {key: inner if key in ("type", "role") else marked(inner, mark) for key, inner in value.items()}
    return value


def _calling(*arguments: Any) -> Message:
    functions = [{"name": f"{_NAME}{n}", "arguments": each} for n, each in enumerate(arguments)]
    calls = [{"id": f"call0000{n}", "type": "function", "function": each} for n, each in enumerate(functions)]
    return {"role": "assistant", "content": "", "tool_calls": calls}
