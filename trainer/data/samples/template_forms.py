"""The forms in which a chat template takes contents and the arguments of calls: each asked of it once."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shardwright.data.records.shapes import BadRecord

Message = dict[str, Any]
_WORD = "Zwanzig"
_ASKED = {"role": "user", "content": _WORD}


@dataclass(frozen=True)
class TemplateForms:
    """``parts``: contents are lists of parts and no strings; ``json``: arguments are strings of JSON and no objects."""

    parts: bool
    json: bool

    def message(self, message: Message) -> Message:
        """The message in these forms. One without content has an empty one, which more templates take than none."""
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part["text"] for part in content)
        made = {**message, "content": [{"type": "text", "text": content}] if self.parts and content else content}
        if message.get("tool_calls"):
            made["tool_calls"] = [self._call(call) for call in message["tool_calls"]]
        return made

    def _call(self, call: Any) -> Any:
        """The call. APIs write its arguments as a string of JSON, and most templates take an object."""
        inner = call.get("function", call)
        given = inner.get("arguments") if isinstance(inner, dict) else None
        if self.json and isinstance(given, dict):
            inner = {**inner, "arguments": json.dumps(given, ensure_ascii=False)}
        elif not self.json and isinstance(given, str):
            inner = {**inner, "arguments": json.loads(given)}
        return {**call, "function": inner} if "function" in call else inner


def forms_of(render: Callable[[list[Message]], str]) -> TemplateForms:
    """The forms that the template of ``render`` takes. That raises BadRecord where the template does."""

    def takes(*messages: Message, word: str = "") -> bool:
        try:
            return word in render([*messages])
        except BadRecord:
            return False

    def call(arguments: Any) -> Message:
        function = {"name": "f", "arguments": arguments}
        call = {"id": "call00000", "type": "function", "function": function}
        return {"role": "assistant", "content": "", "tool_calls": [call]}

    in_parts = {"role": "user", "content": [{"type": "text", "text": _WORD}]}
    parts = not takes(_ASKED, word=_WORD) and takes(in_parts, word=_WORD)
    asked = in_parts if parts else _ASKED
    return TemplateForms(parts, not takes(asked, call({"a": "b"})) and takes(asked, call('{"a": "b"}')))
