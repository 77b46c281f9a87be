"""A chat template at work: it renders chats, and the turns to train on are found in what it renders.

A template may mark them (``{% generation %}``). For any other, the chat is rendered up to each turn, as a server would
to get that turn, and again with the turn, the last message that there is: so the model sees it when it answers. Where
the whole chat begins in the same way, the turn is trained within the whole; else in a sample of its own.

Only the whole and such samples are tokenised, since all beginnings together grow with the square of the turns.
"""

import bisect
import contextlib
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.fields import SAYS
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.chat import Chat, Message
from shardwright.data.samples.template_forms import CLOSED, TemplateForms, marked, text_of
from shardwright.data.samples.template_trial import try_template
from shardwright.data.samples.tokens import Tokens, as_written, in_common
from shardwright.errors import UserError

SHORT, SHORTS = 64, 1024  # characters of a text whose tokens are kept, and how many are: most ends of beginnings recur
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")  # as transformers finds them
_ANSWER = "\U000f0000"  # stands for an answer; a character for private use, which no text has
_OTHER = "a template that takes this chat (--chat_template chatml, or a file)"


@dataclass(frozen=True)
class Turn:
    """The assistant's turn ``message`` in a text's tokens, those from ``start`` to ``end``.

    ``stop``: the label of the last one, where the text goes on with another than the turn's own stop token.
    ``merged``: the first one holds the last letters of the prompt too.
    """

    message: int
    start: int
    end: int
    stop: int | None = None
    merged: bool = False


@dataclass(frozen=True)
class Rendering:
    """Tokens of a chat as far as a turn, or of the whole, and the turns in it to train on."""

    tokens: Sequence[int]
    turns: list[Turn] = field(default_factory=list)


class Template:
    """The tokenizer's chat template. UserError if there is none.

    Args:
        stops: tokens that end a generation.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int]) -> None:
        name = tokenizer.name_or_path or type(tokenizer).__name__
        if not tokenizer.chat_template:
            raise UserError(
                asked="to train on chats",
                found=f"the tokenizer {name} has no chat template",
                why="it says how messages become text",
                instead="--chat_template chatml, or a file; or the tokenizer of the chat model that this shall be "
                "(--tokenizer), whose folder has a chat_template",
            )
        self.name = f"the chat template of {name}"
        self.tokenizer, self.stops = tokenizer, stops
        self.stop_words = {str(tokenizer.convert_ids_to_tokens(stop)): stop for stop in sorted(stops)}
        longest_first = sorted(self.stop_words, key=len, reverse=True)
        self._stop_words = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self._short = functools.lru_cache(SHORTS)(self._tokenise)
        self._forms: dict[bool, TemplateForms] = {}  # a tokenizer may have a template of its own for tools
        self._openings: dict[bool, str] = {}
        self._next: dict[bool, int | None] = {}  # the stop token that the next message begins with, behind calls or not

    def prepared(self, chat: Chat) -> Chat:
        """The chat in the forms that the template takes."""
        key = chat.tools is None
        if key not in self._forms:

            def render(made: list[Message], prompts: bool = False) -> str:
                return str(self._apply(made, replace(chat, options={}), add_generation_prompt=prompts))

            self._forms[key] = TemplateForms(render)
        for i, message in enumerate(chat.messages, start=1):
            self._check_calls(i, message, self._forms[key])
        return replace(chat, messages=[self._forms[key].message(message) for message in chat.messages])

    def _check_calls(self, number: int, message: Message, forms: TemplateForms) -> None:
        """Refuse calls that the template does not write: the turn would end where the model shall call a tool."""
        if message["role"] != "assistant" or not (count := len(message.get("tool_calls") or ())):
            return
        alone = not any(isinstance(message.get(key), str) and message[key].strip() for key in ("content", *SAYS))
        if (alone or forms.calls) and forms.calls < min(count, 2):
            found = f"{count} calls, of which {self.name} writes the first" if forms.calls else "calls alone"
            found += "" if forms.calls else f", which {self.name} does not write"
            raise BadRecord("messages", f"message {number} is {found}", instead=_OTHER)

    def whole(self, chat: Chat) -> str:
        return str(self._apply(chat.messages, chat))

    def text(self, chat: Chat, end: int) -> str:
        """The first ``end`` messages, rendered as a server does to get the next."""
        return str(self._apply(chat.messages[:end], chat, add_generation_prompt=True))

    def ended(self, chat: Chat, turn: int) -> str:
        """The chat up to and with message ``turn``, of which no reasoning is left out.

        DeepSeek-R1's template drops what its own answers begin with: this one is written where the template writes
        another.
        """
        *before, last = chat.messages[: turn + 1]
        made = str(self._apply([*before, last], chat))
        said = text_of(last)
        reasoning, found, _ = said.rpartition(CLOSED)
        if found and _letters(reasoning.partition("<think>")[2] or reasoning) not in _letters(made):
            text = str(self._apply([*before, {**last, "content": marked(last["content"], _ANSWER)}], chat))
            made = text.replace(_ANSWER, said) if text.count(_ANSWER) == 1 else made
        return made

    def begun(self, chat: Chat, turn: int) -> str:
        """The text before message ``turn`` that is there with it too."""
        before = self.text(chat, turn)
        return before[: _common(before, self._seen(chat, turn, before, self.ended(chat, turn)))]

    def marked(self, chat: Chat) -> bool:
        """Whether the template itself marks the assistant's tokens."""
        try:
            template = self.tokenizer.get_chat_template(tools=chat.tools)
        except ValueError as error:  # there are several, and none for such a chat
            raise BadRecord("messages", f"the tokenizer says: {error}", instead=_OTHER) from error
        return bool(_MARKS.search(template))

    def marked_spans(self, chat: Chat) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens, and the spans that the template marks.

        A stop token right behind a span is added to it, since some templates mark the words alone.
        """
        made: Any = self._apply(chat.messages, chat, return_dict=True, return_assistant_tokens_mask=True, tokenize=True)
        tokens, mask = made["input_ids"], np.array([0, *made["assistant_masks"], 0])
        edges = np.flatnonzero(np.diff(mask)).reshape(-1, 2).tolist()
        return tokens, [(a, b + (b < len(tokens) and tokens[b] in self.stops)) for a, b in edges]

    def renderings(self, chat: Chat, whole: Tokens, turns: Sequence[int]) -> tuple[Rendering, list[Rendering]]:
        """The whole with those of ``turns`` that it has as the model sees them, and each other turn by itself.

        A turn is rendered, to see what it says and where it ends, unless one of the same keys, with the same text
        around its words, ended at its first stop token: then that text, or what it had more, is this one's too.

        Raises BadRecord, with the first difference, if what is before a turn is rendered otherwise once it follows.
        """
        shared, alone = Rendering(whole), list[Rendering]()
        stops = [n for n, token in enumerate(whole) if token in self.stops]
        places = {n: place for place, n in whole.added}
        more = dict[Any, tuple[str, str]]()  # a turn's kind → the text that it has more than in the whole, on each side
        for i in turns:
            message, before = chat.messages[i], self.text(chat, i)
            start, merged = self._shared(whole, before) if whole.text.startswith(before) else (len(whole), False)
            first = stops[at] if (at := bisect.bisect_left(stops, start)) < len(stops) else -1
            inner = whole.text[len(before) : places.get(first, 0)]
            kind = (_around(message, inner), *sorted(key for key, value in message.items() if value))
            known = first >= 0 and kind in more and not any(word in str(message) for word in self.stop_words)
            if known and not any(more[kind]):
                shared.turns.append(Turn(i, start, first + 1, merged=merged))
                continue
            # the text has the words as they are: no white space is cut off, and no reasoning taken out
            plain = all(words in inner and CLOSED not in words for words in _words(message))
            if known and plain:
                own = before + inner.join(more[kind])
            else:
                own = self._seen(chat, i, before, self.ended(chat, i))
            turn, tokens = self._rendered(chat, i, before, own, whole)
            if tokens is None:
                shared.turns.append(turn)
                if turn.stop is None and turn.end == first + 1:
                    more[kind] = ("", "")
            elif tokens.text is whole.text:  # with the stop token that it lacks
                shared = Rendering(tokens, [*shared.turns, turn])
            else:
                alone.append(Rendering(tokens, [turn]))
                if plain and own.startswith(before) and own.count(inner, len(before)) == 1:
                    left, _, right = own[len(before) :].partition(inner)
                    more[kind] = (left, right)
        return shared, alone

    def _rendered(self, chat: Chat, i: int, before: str, own: str, whole: Tokens) -> tuple[Turn, Tokens | None]:
        """Turn ``i`` of the text ``own`` in the tokens of the whole (None), or in others."""
        end = self._end(own, _common(before, own))
        if whole.text.startswith(end):
            return self._span(chat, i, before, end, whole)
        word = next((word for word in self.stop_words if end.endswith(word)), "")
        inner = end.removesuffix(word)
        if word and inner.startswith(before) and inner != before and whole.text.startswith(inner):
            at = bisect.bisect_left(whole.added, (len(inner), 0))
            if at < len(whole.added) and whole.added[at][0] == len(inner):  # GPT-OSS's <|return|>, later an <|end|>
                start, merged = self._shared(whole, before)
                return Turn(i, start, whole.added[at][1] + 1, self.stop_words[word], merged), None
        tokens = self._beside(whole, own)
        turn, longer = self._span(chat, i, before, end, tokens)
        return turn, longer or tokens

    def _end(self, own: str, answer: int) -> str:
        """``own`` as far as the first of the stop tokens that end it, or all of it without one behind ``answer``."""
        stops = [*self._stop_words.finditer(own, answer)]
        while len(stops) > 1 and not own[stops[-2].end() : stops[-1].start()].strip():
            del stops[-1]
        return own[: stops[-1].end()] if stops else own

    def _span(self, chat: Chat, i: int, before: str, until: str, tokens: Tokens) -> tuple[Turn, Tokens | None]:
        """Turn ``i`` behind ``before`` and up to the end of ``until``, and the tokens with a stop token added, if any.

        A turn without a stop token ends with the token that begins the next message, if that is one: GLM's do.
        """
        start, merged = self._shared(tokens, before)
        end, _ = self._shared(tokens, until)
        if not self.stops.isdisjoint(tokens[start:end]):
            return Turn(i, start, end, merged=merged), None
        if end < len(tokens):
            return Turn(i, start, end + (tokens[end] in self.stops), merged=merged), None
        if (stop := self._next_stop(chat, i)) is None:
            return Turn(i, start, end, merged=merged), None
        return Turn(i, start, end + 1, merged=merged), Tokens([*tokens, stop], tokens.text, tokens.added)

    def _next_stop(self, chat: Chat, i: int) -> int | None:
        """The stop token that the message behind turn ``i`` begins with, whatever it says; None: it has none."""
        calls = chat.messages[i].get("tool_calls")
        if bool(calls) not in self._next:
            call = calls[0] if calls else {}
            inner = call.get("function", call)
            names = {"name": isinstance(inner, dict) and inner.get("name"), "tool_call_id": call.get("id")}
            turn = {"role": "assistant", "content": "x", **({"tool_calls": calls} if calls else {})}
            behind = {"role": "tool", "content": "x", **names} if calls else {"role": "user", "content": "x"}
            messages = [*chat.messages[:i], *self.prepared(replace(chat, messages=[turn, behind])).messages]
            try:
                ended, longer = (str(self._apply(each, chat)) for each in (messages[:-1], messages))
            except BadRecord:
                ended, longer = "", ""
            rest = longer.removeprefix(ended) if longer.startswith(ended) else ""
            self._next[bool(calls)] = next((id for word, id in self.stop_words.items() if rest.startswith(word)), None)
        return self._next[bool(calls)]

    def _seen(self, chat: Chat, i: int, before: str, own: str) -> str:
        """The text with turn ``i``, ``own``, as the model sees it: behind ``before``, the words of a server.

        A server's last words, such as ``<think>``, need not be in it. Where it begins otherwise than they do, as when
        an answer has others forget their reasoning, the turn alone is taken of it: it begins behind the last generation
        prompt before a sentinel that is put in its place. Raises BadRecord if there is none.
        """
        answer, opening = own.removeprefix(before), self._opening(chat)
        if own.startswith(before) and not (opening and answer.startswith(opening)):
            return own
        base = str(self._apply(chat.messages[:i], chat))
        if own.startswith(before) and before == base:  # behind a tool's result a server of Gemma's begins no turn
            return before + answer.removeprefix(opening)
        if own.startswith(base):
            return own
        message, prompt = chat.messages[i], before.removeprefix(base)
        text = str(self._apply([*chat.messages[:i], marked(message, _ANSWER)], chat))
        n = len(re.sub(r"<[^<>\s]*$", "", own[: _common(before, own)]))  # where they part, between words
        end, words = text.find(_ANSWER), prompt or opening
        while end >= 0 and (words or not prompt):
            at = text.rfind(words, n, end) + len(words) if words in text[n:end] else -1
            at = at if words else n
            if at >= 0 and own.startswith(text[:at]):
                return before.removesuffix(prompt.removeprefix(words)) + own[at:]
            if not words:
                break
            words = words[: max(0, words.rfind("<"))]  # without the last of them
        found = f"they part behind {own[max(0, n - 24) : n]!r}, at {before[n : n + 24]!r} and {own[n : n + 24]!r}"
        raise BadRecord(
            "messages", f"{self.name} renders a chat as far as message {i + 1} otherwise than with it: {found}",
            parts=True, instead=_OTHER,
        )  # fmt: skip

    def _opening(self, chat: Chat) -> str:
        """The text that a server writes behind a question to get an answer."""
        key = chat.tools is None
        if key not in self._openings:
            first = self.prepared(replace(chat, messages=[{"role": "user", "content": "x"}]))
            with contextlib.suppress(BadRecord):
                self._openings[key] = self.text(first, 1).removeprefix(self.whole(first))
        return self._openings.setdefault(key, "")

    def _shared(self, tokens: Tokens, beginning: str) -> tuple[int, bool]:
        """The number of tokens that are those of ``beginning`` too, and whether one of its own goes on otherwise.

        Of a beginning that the text does not go on with, those that are common.
        """
        text = tokens.text
        length = _common(text, beginning)
        last = bisect.bisect_left(tokens.added, (length, 0)) - 1
        place, first = tokens.added[last] if last >= 0 else (0, 0)
        tail = self._tokens(beginning[place:])
        own = tokens[first : first + len(tail)]
        if own == tail:
            return first + len(tail), False
        return first + in_common(own, tail), length == len(beginning)

    def _beside(self, whole: Tokens, own: str) -> Tokens:
        """The tokens of ``own``; only what follows the last added token that it has in common with the whole is read.

        A chat's turns by themselves repeat all that comes before them.
        """
        length = _common(whole.text, own)
        last = bisect.bisect_left(whole.added, (length, 0)) - 1
        while last >= 0 and not own.startswith(self._word(whole, last), whole.added[last][0]):
            last -= 1
        place, first = whole.added[last] if last >= 0 else (0, 0)
        (tail,) = as_written(self.tokenizer, [own[place:]])
        added = [*whole.added[: max(last, 0)], *((place + at, first + n) for at, n in tail.added)]
        return Tokens([*whole[:first], *tail], own, added)

    def _word(self, whole: Tokens, added: int) -> str:
        return str(self.tokenizer.convert_ids_to_tokens(whole[whole.added[added][1]]))

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
            found = f"{self.name} says: {type(error).__name__}: {error}"
            raise BadRecord("messages", found, instead=_OTHER) from error


def _common(one: str, other: str) -> int:
    """The number of letters that both begin with."""
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if one[low:middle] == other[low:middle] else (low, middle)
    return low


def _letters(text: str) -> str:
    return "".join(text.split())


def _around(message: Message, text: str) -> str:
    """``text`` without the words of the message."""
    for words in _words(message):
        text = text.replace(words.strip(), "", 1)
    return text


def _words(message: Message) -> list[str]:
    return [text_of(message), *(message[key] for key in SAYS if isinstance(message.get(key), str))]
