"""Whatever of a record has no effect on tokens or labels is named: each column and each key is dropped in turn.

So is each key within calls, tools and parts of contents. Every template that trl ships is among those tried (trl 1.16,
`trl/chat_templates`).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import operator
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trl

from shardwright.data.records.fields import unread_columns, unread_of
from shardwright.data.records.shapes import BadRecord
from shardwright.data.samples import template_trial
from shardwright.data.samples.samples import Encoder, SampleOptions
from shardwright.errors import UserError
from shardwright.objectives.distill import TAUGHT
from shardwright.objectives.kto import LABELLED
from shardwright.objectives.objective import RecordShape
from shardwright.objectives.pairs import PAIRS
from shardwright.objectives.sft import SHAPES
from tests.support.chats import CHATML, ENDLESS, LLAMA, MARKED, MIXTRAL, PARTING, REASONING, byte_tokenizer

OURS = {
    "chatml": CHATML, "llama": LLAMA, "mixtral": MIXTRAL, "reasoning": REASONING, "marked": MARKED, "endless": ENDLESS,
    "parting": PARTING,
}  # fmt: skip
TRLS = {path.stem: path.read_text() for path in sorted((Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))}
TEMPLATES = {**OURS, **TRLS}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Weather of a town",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {"town": {"type": "string", "description": "its name", "minLength": 2}},
                "required": ["town"],
            },
        },
    }
]
ARGUMENTS = {"town": "Bern", "days": 2, "snow": False}
CALL = {"id": "call12345", "type": "function", "function": {"name": "weather", "arguments": ARGUMENTS}, "index": 0}
USER = {"role": "user", "content": "Bern?", "name": "Ada", "weight": 0, "time": 5}
THOUGHT = {"role": "assistant", "content": "It rains.", "reasoning_content": "I looked.", "id": "m7", "train": True}
CALLING = {"role": "assistant", "content": "One moment.", "tool_calls": [CALL]}
# another name than the call's, which a template may write in its place
RESULT = {"role": "tool", "name": "forecast", "tool_call_id": "call12345", "content": "rain"}
LAST = [{"role": "user", "content": "Then I stay at home."}, {**THOUGHT, "content": "So do I.", "weight": 0}]
SYSTEM = {"role": "system", "content": "You answer in few words."}
PARTS = [{"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}]
OPTIONS = {"chat_template_kwargs": {"enable_thinking": False, "unknown": "x"}}
EXTRA = {"source": "a book", "score": 0.5, **OPTIONS}
GOOD, BAD = ({"role": "assistant", "content": text, "thinking": "what now"} for text in ("Good day!", "Go away"))
ASKED = "\n\nHuman: hi\n\nAssistant:"
RECORDS: dict[str, tuple[RecordShape, dict[str, Any]]] = {
    "plain": (SHAPES[0], {"messages": [SYSTEM, {"role": "user", "content": PARTS}, GOOD], **EXTRA}),
    "turns": (SHAPES[0], {"messages": [USER, THOUGHT, *LAST], **OPTIONS, "image": None, "label": 3}),
    "tools": (SHAPES[0], {"messages": [USER, CALLING, RESULT, THOUGHT], "tools": TOOLS, **OPTIONS}),
    "conversations": (
        SHAPES[1],
        {"conversations": [{"from": "human", "value": "hi", "id": 1}, {"from": "gpt", "value": "Good day!"}]}
        | {"system": SYSTEM["content"], "id": 7},
    ),
    "completion of messages": (SHAPES[2], {"prompt": [USER], "completion": [THOUGHT], "tools": TOOLS, **OPTIONS}),
    "completion": (SHAPES[2], {"prompt": "Two and two? ", "completion": "Four.", "tools": TOOLS, "label": 2, **EXTRA}),
    "instruction": (
        SHAPES[3],
        {"instruction": "And its capital?", "input": "In a word.", "output": "Bern.", "system": "Be brief."}
        | {"history": [["Name a country.", "Switzerland."]], **OPTIONS},
    ),
    "tokens": (
        SHAPES[5],
        {"input_ids": [5, 6, 7, 8, 0], "labels": [-100, 6, 9, 8, 0], "attention_mask": [1, 1, 1, 1, 0]}
        | {"completion_mask": [0, 0, 1, 1, 0], "assistant_masks": [0, 1, 1, 0, 0], "token_type_ids": [0] * 5},
    ),
    "pair": (PAIRS, {"prompt": ASKED, "chosen": " Good day!", "rejected": " Go away", "tools": TOOLS, **EXTRA}),
    "pair without a prompt": (PAIRS, {"chosen": ASKED + " Good day!", "rejected": ASKED + " Go away", "score": 1}),
    "pair of messages": (PAIRS, {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD], "tools": TOOLS, **OPTIONS}),
    "pair of chats": (PAIRS, {"prompt": "hi", "chosen": [USER, GOOD], "rejected": [USER, BAD], **EXTRA}),
    "labelled": (LABELLED[0], {"prompt": "Two and two? ", "completion": "4.", "label": True, "tools": TOOLS, **EXTRA}),
    "labelled messages": (LABELLED[0], {"prompt": [USER], "completion": [GOOD], "label": False, **EXTRA}),
    "tagged": (LABELLED[1], {"prompt": [USER], "completion": [THOUGHT], "kto_tag": True, "label": 1, **OPTIONS}),
    "labelled chat": (LABELLED[2], {"messages": [USER, THOUGHT], "label": True, "system": "Be brief.", **OPTIONS}),
    "tagged chat": (LABELLED[3], {"messages": [USER, CALLING, RESULT, THOUGHT], "kto_tag": 0, "tools": TOOLS}),
    "taught": (
        TAUGHT,
        {"input_ids": [5, 6, 7, 8, 0], "labels": [-100, 6, 9, 8, 0], "attention_mask": [1, 1, 1, 1, 0]}
        | {"completion_mask": [0, 0, 1, 1, 0], "token_type_ids": [0] * 5, "score": 2}
        | {"teacher_ids": [[1, 2]] * 5, "teacher_logprobs": [[-0.5, -1.5]] * 5},
    ),
}  # fmt: skip

RENDERED = ["plain", "turns", "tools", "conversations", "completion of messages", "instruction", "pair of messages"]
OBEYED = {"messages.weight", "messages.train"}  # a loss where there is one, and none where there is none


@pytest.fixture(autouse=True)
def tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of these templates ends; to try it in a process of its own takes a second."""
    monkeypatch.setattr(template_trial, "_tried", {*TEMPLATES.values()})


def encoder_of(template: str | None, shape: RecordShape) -> Encoder:
    def bad(number: int, bad: BadRecord) -> None:
        raise bad

    tokenizer = byte_tokenizer(template and TEMPLATES[template], "<|im_end|>")
    return Encoder(tokenizer, shape, Counter(), bad, SampleOptions())


def made(encoder: Encoder, record: dict[str, Any]) -> tuple[Any, Counter[str]]:
    """The record's tokens and labels, and how often each of its fields was not read."""
    groups = encoder([str(encoder.shape.document(record, typed=False))])
    unread = Counter(name.partition(" (")[0] for name in unread_columns(record, encoder.shape))
    group = [sample for _, group in groups for sample in group]
    for sample in group:
        for name, count in unread_of(sample.counts):
            unread[name.partition(" (")[0]] += count
    return [(sample.tokens.tolist(), sample.labels.tolist()) for sample in group], unread


def name_of(place: tuple[Any, ...]) -> str:
    column, *keys = place
    keys = [{"from": "role", "value": "content"}.get(key, key) for key in keys if isinstance(key, str)]
    words = [column if not keys or column in ("tools", "chat_template_kwargs") else "messages"]
    for key in keys:  # the names that people gave are left out
        words.append("*" if words[-1] in ("arguments", "properties") else key)
    return ".".join(words)


def drops(record: dict[str, Any], deep: bool) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """(a field's name, the record without it), for each column and each key within one; ``deep``: within tools too.

    And whether it stands behind the last turn to train on, in a chat that may be trained as far as that turn alone.
    """
    for place in places(record):
        *above, key = place
        value, name = functools.reduce(operator.getitem, place, record), name_of(place)
        if isinstance(key, int) or value is None or (place[0] == "tools" and place[1:] and not deep):
            continue
        if name not in ("messages.role", "messages.content.type", "chat_template_kwargs"):
            without = copy.deepcopy(record)
            del functools.reduce(operator.getitem, above, without)[key]
            chat = record[place[0]]
            last = len(place) > 2 and chat[-len(LAST) :] == LAST and place[1] >= len(chat) - len(LAST)
            yield name, without, last


def disagreements(template: str, kinds: Iterable[str]) -> tuple[int, list[Any]]:
    """(fields dropped, those that are not named and make no difference, or are and do)."""
    tried, wrong = 0, []
    for kind in kinds:
        shape, record = RECORDS[kind]
        encoder = encoder_of(template, shape)
        try:
            whole, unread = made(encoder, record)
        except BadRecord:
            continue  # the template refuses it, which is said
        same, behind = Counter[str](), Counter[str]()
        for name, without, last in drops(record, deep=kind == "tools"):
            tried, same[name] = tried + 1, same[name]
            with contextlib.suppress(BadRecord):
                same[name] += (equal := made(encoder, without)[0] == whole)
                behind[name] += last and equal
        for name, count in same.items():
            found, words = unread[name], name.split(".")
            told = bool(found) == bool(count) if shape is PAIRS else count - behind[name] <= found <= count
            told |= count > 0 and any(unread[".".join(words[:n])] for n in range(1, len(words)))
            if name not in OBEYED and not told:
                wrong.append((kind, name, count, found))
    return tried, wrong


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_field_is_named_as_not_read_if_and_only_if_tokens_and_labels_are_the_same_without_it(template: str) -> None:
    tried, wrong = disagreements(template, RENDERED)
    assert not wrong
    assert tried > 10


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*place, key)
        yield from places(inner, (*place, key))


ODD = [None, "", 0, True, -1, 1.5, [], {}, [1], [None], [{}], [["a", "b"]], {"a": None}, "null", '{"a": "\\ud800"}']


@pytest.mark.parametrize("template", ["chatml", "marked", "qwen3", "llama3_1", "smolvlm", "gptoss", None])
def test_whatever_stands_in_a_field_makes_a_sample_or_a_bad_record(template: str | None) -> None:
    draw, made_of = random.Random(template), Counter[bool]()
    for _ in range(150):
        shape, record = copy.deepcopy(RECORDS[draw.choice([*RECORDS])])
        for _ in range(draw.randint(1, 2)):
            *above, last = draw.choice([*places(record)])
            functools.reduce(operator.getitem, above, record)[last] = copy.deepcopy(draw.choice(ODD))
        try:
            made(encoder_of(template, shape), record)
            made_of[True] += 1
        except (BadRecord, UserError):
            made_of[False] += 1
    assert min(made_of[True], made_of[False]) > 10


def test_a_column_of_records_without_messages_is_named_if_and_only_if_it_has_no_effect() -> None:
    tried, wrong = disagreements("chatml", RECORDS.keys() - RENDERED)
    assert not wrong
    assert tried > 60
