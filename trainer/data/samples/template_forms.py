"""The forms in which a chat template takes contents and the arguments of calls: each asked of it once."""

import functools
import json
from collections.abc import Callable
from typing import Any

from shardwright.data.records.shapes import BadRecord

Message = dict[str, Any]
_WORD = "Zwanzig"
_ASKED, _IN_PARTS = ({"role": "user", "content": content} for content in (_WORD, [{"type": "text", "text": _WORD}]))


class TemplateForms:
    """The forms that a chat template takes: each is tried with ``render``, which raises BadRecord where it is not."""

    def __init__(self, render: Callable[[list[Message]], str]) -> None:
        self._render = render

    @functools.cached_property
    def in_parts(self) -> bool:
        """Contents are lists of parts, and no strings."""
        return not self._takes(_ASKED, word=_WORD) and self._takes(_IN_PARTS, word=_WORD)

    @functools.cached_property
    def in_json(self) -> bool:
        """Arguments are strings of JSON, and no objects."""
        asked = _IN_PARTS if self.in_parts else _ASKED
        return not self._takes(asked, _call({"a": "b"})) and self._takes(asked, _call('{"a": "b"}'))

    def _takes(self, *messages: Message, word: str = "") -> bool:
        try:
            return word in self._render([*messages])
        except BadRecord:
            return False

    def message(self, message: Message) -> Message:
        """The message in these forms. One without content has an empty one, which more templates take than none."""
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        made = {**message, "content": [{"type": "text", "text": content}] if self.in_parts and content else content}
        if message.get("tool_calls"):
            made["tool_calls"] = [self._called(call) for call in message["tool_calls"]]
        return made

    def _called(self, call: Any) -> Any:
        """The call. APIs write its arguments as a string of JSON, and most templates take an object."""
        inner = call.get("function", call)
        given = inner.get("arguments") if isinstance(inner, dict) else None
        if isinstance(given, dict) and self.in_json:
            inner = {**inner, "arguments": json.dumps(given, ensure_ascii=False)}
        elif isinstance(given, str) and not self.in_json:
            inner = {**inner, "arguments": json.loads(given)}
        return {**call, "function": inner} if "function" in call else inner


def _call(arguments: Any) -> Message:
    function = {"name": "f", "arguments": arguments}
    call = {"id": "call00000", "type": "function", "function": function}
    return {"role": "assistant", "content": "", "tool_calls": [call]}
