"""Records → samples: tokens, and the targets that the loss is on.

Shape legend: T tokens of a sample.
"""

import contextlib
import functools
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.fields import counted, is_empty, named
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples.ablation import unread_fields, unread_of_contents
from shardwright.data.samples.chat import ASSISTANT, ROLES, Chat, chat_of, past_turns, with_last, with_prompt
from shardwright.data.samples.masks import masked
from shardwright.data.samples.teacher_values import taught_values
from shardwright.data.samples.template import Rendering, Template, Turn
from shardwright.data.samples.tokens import Tokens, as_written, in_common
from shardwright.data.tokenizer import plain_tokens, special_ids, token_ids
from shardwright.errors import a_type
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.objective import BAD, GOOD, KTO, LOST_NULLS, RecordShape
from shardwright.objectives.sft import MASKS

_SEVERAL = "several turns, of which the chat template writes one otherwise once more follows"
# prompts of instruction records for tokenizers without a chat template
_INSTRUCTION = "### Instruction:\n{instruction}\n\n### Response:\n"
_INSTRUCTION_INPUT = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"


@dataclass(frozen=True)
class Sample:
    """int32 ``tokens`` and ``labels`` [T]: a token's label is itself, or -100: no loss. ``counts`` are for tallies.

    The last label of a turn may be another stop token, the one that the model writes there.
    ``taught``: of each scored token what a teacher said of it, float32 [T, width], as the objective's column has it.
    """

    tokens: np.ndarray
    labels: np.ndarray
    counts: Mapping[str, int] = field(default_factory=dict)
    place: int = 0  # among the segments of its record, from 1; 0: as it comes
    taught: np.ndarray | None = None

    @property
    def scored(self) -> int:
        """The number of targets that the loss is on; a first token is no target."""
        return int((self.labels[1:] != IGNORE).sum())


@dataclass(frozen=True)
class SampleOptions:
    """The options by which records become samples, and samples rows."""

    train_on_prompt: bool = False  # the loss is on every token, not on the answers alone
    overflow: str = "truncate_right"  # for samples longer than a row: of shardwright.arguments.data_options.OVERFLOW
    packing: bool = True  # several samples share a row; else each has its own
    on_bad_row: str = "error"  # or "skip": for records that can't become a sample
    stops: frozenset[int] = frozenset()  # tokens that end a generation, beside the tokenizer's end-of-text token
    split_special_tokens: bool | None = None  # False: the names of special tokens in texts are tokens, else letters
    groups: int | None = None  # the most records that share a row; None: as many as fit
    segments: tuple[str, ...] = ()  # the places that a record has in a row's segment numbers; empty: its answers'
    taught: int | None = None  # tokens of a teacher to keep at each target, of records that hold them; None: none
    vocabulary: int | None = None  # tokens that the model knows, padding's too; None: as many as the tokenizer
    train_on: str = "all"  # the turns of a chat: of shardwright.arguments.data_options.TRAIN_ON


# a record's sample, or the answers to its prompt, each behind the whole prompt: isolated segments of one row
Group = tuple[Sample, ...]
# (a record's texts to tokenise, the function from the list of their Tokens to the samples)
Draft = tuple[list[str], Callable[[list[Tokens]], list[Group]]]


def joined(group: Group) -> Sample:
    """The samples of ``group`` concatenated into one, to inspect."""
    if len(group) == 1:
        return group[0]
    counts: Counter[str] = sum((Counter(each.counts) for each in group), Counter())
    return Sample(
        np.concatenate([each.tokens for each in group]), np.concatenate([each.labels for each in group]), counts
    )


class Encoder:
    """Records of one shape → samples. Raises UserError for chats if the tokenizer has no template for them.

    Of the options' ``stops`` only special tokens count, as an id from a config made for another tokenizer may be a
    letter here.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        shape: RecordShape,
        tally: Counter[str],  # gets the counts of the samples
        on_bad: Callable[[int, BadRecord], None],  # called with each bad record's number, and why; it may raise
        options: SampleOptions,
    ) -> None:
        self.tokenizer, self.shape, self.tally, self.on_bad = tokenizer, shape, tally, on_bad
        self.options, self.train_on_prompt = options, options.train_on_prompt
        self.last_turns = options.train_on == "last"
        self.end = int(tokenizer.eos_token_id)
        self.stops = (options.stops & special_ids(tokenizer)) | {self.end}
        self.tools: dict[str, list[str]] = {}  # in JSON → the names of their parts that the template does not read
        # the tokenizer's beginning of a prompt (Llama's <s>)
        first = tokenizer("", verbose=False)["input_ids"][:1]
        self.begin = first if first and first == [tokenizer.bos_token_id] else []

    @functools.cached_property
    def template(self) -> Template:
        return Template(self.tokenizer, self.stops)

    @functools.cached_property
    def ids(self) -> int:
        return token_ids(self.tokenizer)

    def __call__(self, documents: Sequence[str]) -> list[tuple[int, Group]]:
        """(number, samples) of each of ``documents``, which are records as strings; bad ones are left out.

        A chat makes several, one after another, if its template writes a turn otherwise once more follows.
        """
        if self.shape.is_text:
            parse = self.options.split_special_tokens is False
            texts_tokens = plain_tokens(self.tokenizer, documents, self.tally, parse)
            return [(number, (self._sample([*tokens, self.end]),)) for number, tokens in enumerate(texts_tokens)]
        drafts: list[tuple[int, Draft, Counter[str]]] = []
        for number, document in enumerate(documents):
            with self._telling_of_bad(number):
                unread = Counter[str]()  # fields without effect
                drafts.append((number, self._draft(document, unread), unread))
        texts = [text for _, (texts, _), _ in drafts for text in texts]
        tokens = iter(as_written(self.tokenizer, texts))
        groups: list[tuple[int, Group]] = []
        for number, (texts, make), unread in drafts:
            found = [next(tokens) for _ in texts]
            with self._telling_of_bad(number):
                (first, *others), *more = make(found)
                groups.append((number, (replace(first, counts={**first.counts, **counted(unread)}), *others)))
                groups += [(number, group) for group in more]
        for _, group in groups:
            for sample in group:
                self.tally.update(sample.counts)
        return groups

    @contextlib.contextmanager
    def _telling_of_bad(self, number: int) -> Iterator[None]:
        try:
            yield
        except BadRecord as bad:
            self.on_bad(number, bad)

    def _draft(self, document: str, unread: Counter[str]) -> Draft:
        values: dict[str, Any] = json.loads(document)
        if lost := values.pop(LOST_NULLS, 0):
            unread[named(LOST_NULLS, None)] += lost
        for name in self.shape.refused:
            if is_empty(value := values.get(name)):
                continue
            if name not in KTO:
                raise BadRecord(name, f"{a_type(value)} for the model to see, and a run trains on text alone")
            if isinstance(value, bool):
                found = (
                    f"{value}: a record of KTO's, whose answer is a good one or a bad one, and sft would train on both"
                )
                instead = f"--objective kto learns from both; or keep those whose {name} is true, without the column"
                raise BadRecord(name, f"{found}. {instead}")
            unread[named(name, value)] += 1
        for name in self.shape.required:
            if values.get(name) in (None, "", []) and not (name == "prompt" and values.get(name) == ""):
                raise BadRecord(name, "nothing")
        if "input_ids" in self.shape.required:
            return [], lambda _: self._given(values)
        if self.shape.name == "instruction/output":
            return self._instruction(values, unread)
        if len(self.shape.answers) > 1:
            return self._answers(values, unread)
        return self._labelled(values, unread) if self.shape.label else self._single(values, unread)

    def _single(self, values: Mapping[str, Any], unread: Counter[str]) -> Draft:
        """A completion behind its prompt, or a chat."""
        if self.shape.answers and isinstance(values["prompt"], str):
            (name,) = self.shape.answers
            if isinstance(values[name], str):
                _leave(values, unread, "tools", "chat_template_kwargs")
                return self._completion(values["prompt"], values[name])
            found = "messages" if isinstance(values[name], list) else a_type(values[name])
            raise BadRecord(name, f"{found} behind a prompt that is a string")
        return self._chat(chat_of(values), unread)

    def _labelled(self, values: Mapping[str, Any], unread: Counter[str]) -> Draft:
        """An answer, of messages the last one, in the place that the record's label gives it."""
        label = self.shape.label
        if values[label] not in (0, 1):
            raise BadRecord(label, f"{values[label]!r:.80}, where an answer is a good one, true, or a bad one, false")
        place = 1 if values[label] else 2
        texts, make = self._single(with_last(values) if "messages" in values else values, unread)

        def made(tokens: list[Tokens]) -> list[Group]:
            (sample,), *others = make(tokens)
            if others:
                raise BadRecord(self.shape.required[-2], _SEVERAL, instead="--train_on last")
            counts = {**sample.counts, f"{(GOOD, BAD)[place - 1]} answers": 1}
            return [(replace(sample, counts=counts, place=place),)]

        return texts, made

    def _sample(self, tokens: Sequence[int], first: int = 0) -> Sample:
        """A sample with the loss on the tokens from ``first`` on."""
        made = np.array(tokens, dtype=np.int32)
        labels = made.copy()
        if not self.train_on_prompt:
            labels[:first] = IGNORE
        return Sample(made, labels)

    def _given(self, values: Mapping[str, Any]) -> list[Group]:
        """The record's own tokens, and labels if it has them."""
        arrays = []
        for name in ("input_ids", "labels"):
            given = values.get(name, values["input_ids"])
            least = IGNORE if name == "labels" else 0
            whole = isinstance(given, list) and set(map(type, given)) <= {int}
            if not whole or (given and not least <= min(given) <= max(given) < 1 << 31):
                raise BadRecord(name, "something other than a list of tokens")
            if given and max(given) >= self.ids:
                raise BadRecord(name, f"token {max(given)}, and the tokenizer has {self.ids}")
            arrays.append(np.array(given, dtype=np.int32))
        tokens, labels = arrays
        if tokens.shape != labels.shape:
            raise BadRecord("labels", f"{len(labels)} labels of {len(tokens)} tokens")
        read = MASKS[:1] if self.train_on_prompt else MASKS
        masks = {name: values[name] for name in read if name in values}
        sample = Sample(*masked(masks, tokens, tokens if self.train_on_prompt else labels))
        if self.options.taught is None:
            return [(sample,)]
        seen = np.array(masks.get(MASKS[0], [1] * len(tokens)), dtype=bool)
        known = self.options.vocabulary or self.ids
        taught = taught_values(values, seen, sample.labels, self.options.taught, known)
        return [(replace(sample, taught=taught),)]

    def _completion(self, prompt: str, completion: str) -> Draft:
        def make(tokens: list[Tokens]) -> list[Group]:
            asked, whole = tokens
            # up to the first token that differs from the prompt's own, even if it also holds the prompt's last letters
            first = in_common(asked, whole)
            begin = self.begin if whole[:1] != self.begin else []
            end = [] if whole[-1:] == [self.end] else [self.end]
            sample = self._sample([*begin, *whole, *end], len(begin) + first)
            return [(replace(sample, counts={"merged": int(first < len(asked))}),)]

        return [prompt, prompt + completion], make

    def _answers(self, values: Mapping[str, Any], unread: Counter[str]) -> Draft:
        """Each answer, drafted as in a record of its own."""
        names = self.shape.answers
        if any(values[name] == values[names[0]] for name in names[1:]):
            raise BadRecord(names[-1], f"no answer that differs from the {names[0]} one")
        texts = [name for name in names if isinstance(values[name], str)]
        if 0 < len(texts) < len(names):
            raise BadRecord(texts[0], "a string beside an answer that is messages")
        if texts and not isinstance(values.get("prompt", ""), str):
            raise BadRecord("prompt", "no string before answers that are strings")
        if texts:
            _leave(values, unread, "tools", "chat_template_kwargs")
            values = with_prompt(values, names)
            drafts = [self._completion(values["prompt"], values[name]) for name in names]
        else:
            whole = with_prompt(values, names)
            _leave(values, unread, *(["prompt"] if isinstance(values.get("prompt"), str) else []))
            drafts = [self._chat(chat_of(whole, name), unread) for name in names]

        def make(tokens: list[Tokens]) -> list[Group]:
            left = iter(tokens)
            made = [make([next(left) for _ in own]) for own, make in drafts]
            for name, found in zip(names, made, strict=True):
                if len(found) > 1:
                    raise BadRecord(name, _SEVERAL, instead="--train_on last")
            answers = tuple(sample for ((sample,),) in made)
            if texts:  # the prompt's last token may merge into one answer only: then all are scored from it on
                start = min(int(np.argmax(sample.labels != IGNORE)) for sample in answers)
                for sample in answers:
                    sample.labels[start:] = sample.tokens[start:]
            return [answers]

        return [text for own, _ in drafts for text in own], make

    def _instruction(self, values: Mapping[str, Any], unread: Counter[str]) -> Draft:
        for name in ("instruction", "output", "input", "system"):
            if not isinstance(values.get(name, ""), str):
                raise BadRecord(name, f"{a_type(values[name])}, not text")
        if not self.tokenizer.chat_template:
            if values.get("history"):
                raise BadRecord("history", "earlier turns, and the tokenizer has no chat template to write them")
            _leave(values, unread, "chat_template_kwargs")
            form = _INSTRUCTION_INPUT if values.get("input") else _INSTRUCTION
            system = f"{values['system']}\n\n" if values.get("system") else ""
            return self._completion(system + form.format(**values), values["output"])
        asked = "\n\n".join(filter(None, (values["instruction"], values.get("input"))))
        prompt = [*past_turns(values.get("history")), {"role": "user", "content": asked}]
        completion = [{"role": ASSISTANT, "content": values["output"]}]
        return self._chat(chat_of({**values, "prompt": prompt, "completion": completion}), unread)

    def _chat(self, chat: Chat, unread: Counter[str]) -> Draft:
        template = self.template
        unread.update(unread_of_contents(chat))
        chat = template.prepared(chat)
        if template.marked(chat):
            tokens, spans = template.marked_spans(chat)
            unread.update(unread_fields(chat, template.whole(chat), template, self.tools))
            # turns of the prompt are not trained on, nor the beginning of an answer that it ends with
            prompt = [template.text(chat, chat.first)] if chat.first else []

            def make_marked(found: list[Tokens]) -> list[Group]:
                least = sum(map(len, found))
                turns = self._marked(chat, [(max(a, least), b) for a, b in spans if b > least])
                return [self._turns(chat, Rendering(tokens, turns))]

            return prompt, make_marked
        whole = template.whole(chat)

        def make(found: list[Tokens]) -> list[Group]:
            loud = self._loud(chat)
            shared, alone = template.renderings(chat, found[0], chat.turns if self.train_on_prompt else loud)
            others = [each.turns[0].message for each in alone]
            # what is behind the last turn to train on has no effect unless the whole is a sample
            end = None if shared.turns or self.train_on_prompt or not alone else max(others) + 1
            unread.update(unread_fields(chat, whole, template, self.tools, others, end))
            hidden = chat.silent.intersection(others)
            if self.train_on_prompt and hidden:
                raise BadRecord("messages", f"{template.name} writes a turn of weight 0 otherwise once more follows")
            if self.train_on_prompt or not alone:
                return [self._turns(chat, shared)]
            made = sorted([*alone, *([shared] if shared.turns else [])], key=lambda each: each.turns[0].message)
            return [self._turns(chat, each, first=each is made[0], alone=each is not shared) for each in made]

        return [whole], make

    def _loud(self, chat: Chat) -> list[int]:
        """The numbers of the messages to train on."""
        loud = [i for i in chat.turns if i not in chat.silent]
        return loud[-1:] if self.last_turns else loud

    def _marked(self, chat: Chat, spans: Sequence[tuple[int, int]]) -> list[Turn]:
        """The turns to train on, and the silent ones, of those that a template marks."""
        turns = chat.turns
        if chat.silent.intersection(turns) and len(spans) != len(turns):
            found = (
                f"the chat template marks {len(spans)} spans of {len(turns)} turns: which have weight 0 can't be told"
            )
            raise BadRecord("messages", found)
        if len(spans) != len(turns):
            spans = spans[-1:] if self.last_turns else spans
            return [Turn(-1, a, b) for a, b in spans]
        kept = {*self._loud(chat), *chat.silent}
        return [Turn(i, a, b) for i, (a, b) in zip(turns, spans, strict=True) if i in kept]

    def _turns(self, chat: Chat, rendering: Rendering, first: bool = True, alone: bool = False) -> Group:
        """A sample with the loss on the turns of ``rendering``, but for silent ones.

        ``first``: of the chat's samples, the one that bears its counts. ``alone``: its turn is by itself.
        """
        loud = [turn for turn in rendering.turns if turn.message not in chat.silent]
        counts = Counter[str]()
        if first:
            counts.update(f"unknown role {m['role']!r}" for m in chat.messages if m["role"] not in ROLES)
            counts["silent turns"] = len(chat.silent.intersection(chat.turns))
            counts["earlier turns"] = len(chat.turns) - counts["silent turns"] - 1 if self.last_turns else 0
        sample = self._sample(rendering.tokens, len(rendering.tokens))
        for turn in rendering.turns:
            place = slice(turn.start, turn.end)
            sample.labels[place] = sample.tokens[place] if turn in loud else IGNORE
            if turn.stop is not None:
                sample.labels[turn.end - 1] = turn.stop
        counts["turns"], counts["merged"] = len(loud), sum(turn.merged for turn in loud)
        counts["turns alone"] = alone * len(loud)
        counts["turns without stop"] = sum(self.stops.isdisjoint(sample.labels[t.start : t.end].tolist()) for t in loud)
        return (replace(sample, counts=counts),)


def _leave(values: Mapping[str, Any], unread: Counter[str], *names: str) -> None:
    """Count those of ``names`` that hold something, in a record that is read without them."""
    unread.update(named(name, values[name]) for name in names if not is_empty(values.get(name)))
