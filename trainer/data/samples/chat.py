"""Chats: a record's messages, and the tokens of them that are trained on.

A template may mark them (``{% generation %}``). For any other, the conversation is rendered up to each turn of the
assistant, as a server would to get that turn, and again with the turn. Each must be a beginning of the whole; the turn
is the difference of the two. Only the whole is tokenised, since all its beginnings together grow with the square of the
turns: a place in the text is found among the tokens by the added token before it, behind which tokens are independent.
"""

import bisect
import contextlib
import functools
import inspect
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.fields import SAYS, is_empty
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.masks import silenced
from shardwright.data.samples.template_forms import TemplateForms
from shardwright.data.samples.template_trial import try_template
from shardwright.errors import UserError

Message = dict[str, Any]
ASSISTANT = "assistant"
ROLES = {"system", "developer", "user", ASSISTANT, "tool"}
# names of the roles in other formats
ROLE_OF = {
    "human": "user",
    **dict.fromkeys(("gpt", "model", "chatgpt", "bot", "function_call"), ASSISTANT),
    **dict.fromkeys(("function", "observation", "function_response"), "tool"),
}
_KEY_OF = {"from": "role", "value": "content"}
# what a record may not set of the renderer's own arguments
_OWN = {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"documents"}
SHORT, SHORTS = 64, 1024  # characters of a text whose tokens are kept, and how many are: most ends of beginnings recur
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds them


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
    tools = _list("tools", values["tools"]) if values.get("tools") else None
    system = values.get("system") or ""
    if not isinstance(system, str):
        raise BadRecord("system", f"a {type(system).__name__}, not text")
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
        raise BadRecord(name, f"a {type(options).__name__}, not an object")
    if taken := sorted(_OWN & options.keys()):
        raise BadRecord(name, f"{', '.join(taken)}, which a run says and no record")
    return options


def past_turns(history: Any) -> list[Message]:
    """The messages of an instruction's ``history``, a list of what was asked and answered; raises BadRecord."""
    turns = _list("history", history) if history else []
    if any(not isinstance(turn, list) or [type(text) for text in turn] != [str, str] for turn in turns):
        raise BadRecord("history", "something other than pairs of what was asked and what was answered")
    return [
        {"role": role, "content": text} for turn in turns for role, text in zip(("user", ASSISTANT), turn, strict=True)
    ]


def with_beginning(values: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    """A record of ``answers`` as strings, with a ``prompt``: its own, else their common beginning, as trl cuts it.

    Where they part, a space before belongs to both; where one ends, its last letter. Raises BadRecord if there is
    nothing before.
    """
    if values.get("prompt") is not None:
        return dict(values)
    texts = [values[name] for name in answers]
    end, parts = _in_common(texts)
    prompt = texts[0][:end].removesuffix(" " if parts else "")
    if not prompt:
        raise BadRecord("prompt", "none, and the answers have no common beginning")
    return {**values, "prompt": prompt, **{name: values[name].removeprefix(prompt) for name in answers}}


def with_prompt(values: Mapping[str, Any], answers: Sequence[str]) -> dict[str, Any]:
    """A record of ``answers`` as messages, with a ``prompt``: its own, else their common first messages, as trl has it.

    The last of these belongs to the answers where one has no other. Raises BadRecord if no message is common.
    """
    if isinstance(values.get("prompt"), list):
        return dict(values)
    chats = {name: _list(name, values[name]) for name in answers}
    (common, _), first, other = _in_common([*chats.values()]), answers[0], answers[-1]
    if not common:
        raise BadRecord(first, f"messages of which the first is not the first of `{other}`, and no prompt")
    return {**values, "prompt": chats[first][:common], **{name: chat[common:] for name, chat in chats.items()}}


def with_last(values: Mapping[str, Any]) -> dict[str, Any]:
    """A record of ``messages`` whose last one is the ``completion`` behind a ``prompt``; raises BadRecord if alone."""
    *asked, last = _list("messages", values["messages"])
    if not asked:
        raise BadRecord("messages", "a single one, which answers nothing")
    return {**{k: v for k, v in values.items() if k != "messages"}, "prompt": asked, "completion": [last]}


def _in_common(texts: Sequence[Sequence[Any]]) -> tuple[int, bool]:
    """The first letters or messages that all have in common, but for one's very last; and whether all go on there."""
    same = (all(each == first for each in others) for first, *others in zip(*texts, strict=False))
    common, shortest = sum(itertools.takewhile(bool, same)), min(map(len, texts))
    return min(common, shortest - 1), common < shortest


def _list(column: str, value: Any) -> list[Any]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRecord(column, f"a string that is no JSON: {error}") from error
    if not isinstance(value, list) or not value:
        raise BadRecord(column, f"{'nothing' if value in (None, [], {}) else type(value).__name__}, not a list")
    return value


def _messages(column: str, value: Any) -> list[Message]:
    return [_message(column, i, message) for i, message in enumerate(_list(column, value), start=1)]


def _message(column: str, number: int, value: Any) -> Message:
    if not isinstance(value, dict):
        raise BadRecord(column, f"message {number} is a {type(value).__name__}, not a role and its content")
    message: Message = {str(_KEY_OF.get(key, key)): inner for key, inner in value.items()}
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise BadRecord(column, f"message {number} has no role")
    message["role"] = role = ROLE_OF.get(role, role)
    parts = content if isinstance(content, list) else []
    if any(not isinstance(part, dict) or not isinstance(part.get("text"), str) for part in parts):
        raise BadRecord(column, f"message {number} ({role}) has a part that is no text")
    if not isinstance(content, str | list | None):
        raise BadRecord(column, f"the content of message {number} ({role}) is a {type(content).__name__}, not text")
    empty = not parts if isinstance(content, list) else not (content or "").strip()
    if empty and all(is_empty(message.get(key)) for key in SAYS) and role in ("user", ASSISTANT):
        raise BadRecord(column, f"message {number} ({role}) is empty")
    if message.get("tool_calls"):
        message["tool_calls"] = _list(column, message["tool_calls"])
        for call in message["tool_calls"]:
            _check_call(column, number, call)
    return message


def _check_call(column: str, number: int, call: Any) -> None:
    if not isinstance(call, dict):
        raise BadRecord(column, f"a tool call of message {number} is a {type(call).__name__}, not an object")
    inner = call.get("function", call)
    if isinstance(inner, dict) and isinstance(inner.get("arguments"), str):
        try:
            json.loads(inner["arguments"])
        except ValueError as error:
            raise BadRecord(column, f"the arguments of a tool call of message {number} are no JSON: {error}") from error


class Tokens(list[int]):
    """The tokens of ``text``. ``added``: (place in the text, number) of each added token; tokens part there."""

    def __init__(self, tokens: Sequence[int], text: str, added: Sequence[tuple[int, int]]) -> None:
        super().__init__(tokens)
        self.text, self.added = text, added


def as_written(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tokens]:
    """The tokens of each text, in which the name of a special token is that token."""
    if not texts:
        return []
    added = tokenizer.added_tokens_decoder if tokenizer.is_fast else {}  # others don't tell places
    # verbose=False: no warning that a text is longer than the model's context
    options = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
    made = tokenizer(list(texts), return_offsets_mapping=bool(added), **options)
    numbers = ([n for n, token in enumerate(tokens) if token in added] for tokens in made["input_ids"])
    places = ([(made["offset_mapping"][i][n][0], n) for n in own] for i, own in enumerate(numbers))
    return [Tokens(*each) for each in zip(made["input_ids"], texts, places, strict=True)]


class Template:
    """The tokenizer's chat template: renders chats, and finds the turns in their tokens. UserError if there is none.

    Args:
        stops: tokens that end a generation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int]) -> None:
        if not tokenizer.chat_template:
            raise UserError(
                asked="to train on chats",
                found=f"the tokenizer {tokenizer.name_or_path or type(tokenizer).__name__} has no chat template",
                why="it says how messages become text",
                instead="the tokenizer of the chat model that this shall be (--tokenizer), whose folder has a "
                "chat_template",
            )
        self.tokenizer, self.stops = tokenizer, stops
        self.stop_words = tokenizer.convert_ids_to_tokens(sorted(stops))
        self._short = functools.lru_cache(SHORTS)(self._tokenise)
        self._forms: dict[bool, TemplateForms] = {}  # a tokenizer may have a template of its own for tools

    def prepared(self, chat: Chat) -> Chat:
        """The chat in the forms that the template takes."""
        key = chat.tools is None
        if key not in self._forms:
            self._forms[key] = TemplateForms(lambda made: self.whole(replace(chat, messages=made, options={})))
        return replace(chat, messages=[self._forms[key].message(message) for message in chat.messages])

    def whole(self, chat: Chat) -> str:
        return self._apply(chat.messages, chat)

    def marked(self, chat: Chat) -> bool:
        """Whether the template itself marks the assistant's tokens."""
        try:
            template = self.tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:  # there are several, and none for such a chat
            raise BadRecord("messages", f"the tokenizer says: {error}") from error
        return bool(_MARKS.search(template))

    def marked_spans(self, chat: Chat) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens, and the spans that the template marks.

        A stop token right behind a span is added to it, since some templates mark the words alone.
        """
        made: Any = self._apply(chat.messages, chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True)
        tokens, mask = made["input_ids"], np.array([0, *made["assistant_masks"], 0])
        edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2).tolist()
        return tokens, [(a, b + (b < len(tokens) and tokens[b] in self.stops)) for a, b in edges]

    def asked(self, chat: Chat, turn: int) -> str:
        """The whole, and the chat before a turn."""
        return self.whole(chat) + (self.text(chat, turn) if turn else "")

    def text(self, chat: Chat, end: int) -> str:
        """The first ``end`` messages, rendered as a server does to get the next."""
        return self._apply(chat.messages[:end], chat, add_generation_prompt=True)

    def texts(self, chat: Chat) -> list[str]:
        """The whole chat."""
        return [self.whole(chat)]

    def spans(self, chat: Chat, tokens: Sequence[Tokens]) -> list[tuple[int, int]]:
        """The turns' spans in the whole. ``tokens``: of :meth:`texts`.

        A turn is rendered, to see where it ends, unless it is not the last, writes out no stop token, and one of the
        same keys, with as many stop tokens up to the next turn, ended at the first of them.

        Raises BadRecord, with the first difference, if the chat before a turn is rendered differently once it follows.
        """
        (whole,) = tokens
        stops = [n for n, token in enumerate(whole) if token in self.stops]
        starts, spans, alike = [], [], set()
        for i in chat.turns:
            before = self.text(chat, i)
            start = self._count(whole, before)
            starts.append(start if start is not None else self._begins(whole, before, f"as far as message {i + 1}"))
        for i, (start, next_start) in zip(chat.turns, itertools.pairwise([*starts, len(whole)]), strict=True):
            own = stops[bisect.bisect_left(stops, start) : bisect.bisect_left(stops, next_start)]
            message = chat.messages[i]
            kind = (len(own), *sorted(key for key, value in message.items() if value))
            known = kind in alike and i < chat.turns[-1] and not any(word in str(message) for word in self.stop_words)
            end = own[0] + 1 if known else self._end(chat, whole, i, own)
            if own and end == own[0] + 1:
                alike.add(kind)
            spans.append((start, end))
        return spans

    def _end(self, chat: Chat, whole: Tokens, turn: int, stops: Sequence[int]) -> int:
        """The end of message ``turn`` in the tokens; ``stops`` are the places of those from it up to the next turn."""
        with_it = self._apply(chat.messages[: turn + 1], chat)
        end = self._count(whole, with_it)
        if end is None:
            # Qwen3's drops the reasoning of all turns but the last: this one ends at its stop token
            end = stops[0] + 1 if stops else self._begins(whole, with_it, f"up to and with message {turn + 1}")
        # tokens behind the last stop token are never generated
        return max((stop + 1 for stop in stops if stop < end), default=end)

    def _count(self, whole: Tokens, beginning: str) -> int | None:
        """The number of the whole's tokens that are those of ``beginning``; None: there is none."""
        if not whole.text.startswith(beginning):
            return None
        last = bisect.bisect_left(whole.added, (len(beginning), 0)) - 1
        place, first = whole.added[last] if last >= 0 else (0, 0)
        tail = self._tokens(beginning[place:])
        count = first + len(tail)
        return count if whole[first:count] == tail else None

    def _begins(self, whole: Tokens, beginning: str, what: str) -> int:
        """The number of tokens of ``beginning``; raises BadRecord if the whole has others."""
        tokens = self._tokens(beginning)
        if whole[: len(tokens)] == tokens:
            return len(tokens)
        pairs = zip(whole, tokens, strict=False)
        at = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(whole), len(tokens)))
        first, second = (self.tokenizer.decode(each[max(0, at - 4) : at + 6]) for each in (whole, tokens))
        raise BadRecord(
            "messages",
            f"the chat template renders a chat {what} otherwise than the whole: they part at token {at + 1}, "
            f"{second!r} where the whole has {first!r}",
            parts=True,
        )

    def _tokens(self, text: str) -> list[int]:
        read = self._short if len(text) <= SHORT else self._tokenise
        return read(text)

    def _tokenise(self, text: str) -> list[int]:
        return as_written(self.tokenizer, [text])[0]

    def _apply(self, messages: list[Message], chat: Chat, **options: Any) -> Any:
        try_template(self.tokenizer, messages, chat.tools)
        try:
            options = {**chat.options, "tokenize": False, **options}
            made: Any = self.tokenizer.apply_chat_template(messages, tools=chat.tools, **options)
            if isinstance(made, str):
                made.encode()  # JSON within a string may hold half a character
            return made
        except Exception as error:  # of many types: the template raises its own, or misses a value
            raise BadRecord("messages", f"the chat template says: {type(error).__name__}: {error}") from error
