"""Pairs of answers: every form of record, the two in one row and apart, cut alike, and so many in a row at most."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.pairs import PAIRS
from tests.data.test_fitting import pieces
from tests.support.chats import CHAT, CHATML, byte_tokenizer, chats, write_records

TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")
ASKED = [{"role": "user", "content": "one and one?"}]
GOOD, BAD = ([{"role": "assistant", "content": word}] for word in ("two", "eleven"))


def scored(tokens: list[int], labels: list[int]) -> tuple[str, str]:
    """The text of a segment that is not scored, and the text that is."""
    answer = [token for token, label in zip(tokens, labels, strict=True) if label != IGNORE]
    return TOKENIZER.decode(tokens[: len(tokens) - len(answer)]), TOKENIZER.decode(answer)


def packed(*records: dict[str, Any], length: int = 256, **options: Any) -> list[tuple[list[int], list[int]]]:
    packer = SamplePacker(TOKENIZER, PAIRS, length, SampleOptions(**{"groups": 4, **options}))
    return pieces(packer.rows([str(PAIRS.document(record)) for record in records]))


def test_strings_are_the_prompt_and_an_answer_twice_and_then_the_end_of_text() -> None:
    chosen, rejected = packed({"prompt": "1+1=", "chosen": "2", "rejected": "11"})
    assert scored(*chosen) == ("1+1=", "2<|im_end|>")
    assert scored(*rejected) == ("1+1=", "11<|im_end|>")


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": ASKED, "chosen": GOOD, "rejected": BAD},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},  # the prompt is what both begin with
        {"prompt": "one and one?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    ],
)
def test_messages_are_rendered_by_the_chat_template_with_their_prompt_or_without(record: dict[str, Any]) -> None:
    chosen, rejected = packed(record)
    asked = TOKENIZER.apply_chat_template(ASKED, tokenize=False, add_generation_prompt=True)
    assert scored(chosen[0][:-1], chosen[1][:-1]) == (asked, "two<|im_end|>")  # a line's end is never generated
    assert scored(rejected[0][:-1], rejected[1][:-1]) == (asked, "eleven<|im_end|>")


def test_a_prompt_with_earlier_turns_of_the_assistant_is_not_scored() -> None:
    found = packed({"prompt": CHAT[:3], "chosen": CHAT[3:], "rejected": BAD})
    assert [TOKENIZER.decode([t for t, y in zip(*each, strict=True) if y != IGNORE]) for each in found] == [
        "three<|im_end|>",
        "eleven<|im_end|>",
    ]


def test_a_row_has_as_many_pairs_as_it_may_and_never_half_of_one() -> None:
    packer = SamplePacker(TOKENIZER, PAIRS, 256, SampleOptions(groups=4))
    columns = packer.rows([str(PAIRS.document({"prompt": f"{i}", "chosen": "a", "rejected": "b"})) for i in range(10)])
    assert [int(row.max()) for row in columns["segment_ids"]] == [8, 8, 4]
    answers = [scored(*each) for each in pieces(columns)]
    assert all(
        a[0] == b[0] and (a[1], b[1]) == ("a<|im_end|>", "b<|im_end|>")
        for a, b in zip(answers[::2], answers[1::2], strict=True)
    )


@pytest.mark.parametrize(("overflow", "kept"), [("truncate_right", (12, 4)), ("truncate_left", (12, 4)), ("drop", ())])
def test_a_pair_longer_than_a_row_is_cut_where_it_is_the_longest(overflow: str, kept: tuple[int, ...]) -> None:
    found = packed({"prompt": "1", "chosen": "x" * 20, "rejected": "yy"}, length=16, overflow=overflow)
    assert tuple(len(tokens) for tokens, _ in found) == kept
    both = packed({"prompt": "1", "chosen": "x" * 20, "rejected": "y" * 30}, length=16, overflow="truncate_right")
    assert [len(tokens) for tokens, _ in both] == [8, 8]


def test_a_pair_of_which_an_answer_is_cut_off_whole_is_dropped_and_counted() -> None:
    packer = SamplePacker(TOKENIZER, PAIRS, 16, SampleOptions(groups=1))
    assert not len(packer.rows([str(PAIRS.document({"prompt": "p" * 9, "chosen": "a", "rejected": "b"}))])["input_ids"])
    assert packer.tally["without target"] == 1


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"chosen": "a", "rejected": "b"}, "column prompt"),
        ({"prompt": "p", "chosen": "a", "rejected": BAD}, "column chosen"),
        ({"prompt": "p", "chosen": "", "rejected": "b"}, "column chosen: nothing"),
        ({"chosen": GOOD, "rejected": BAD}, "column prompt: none, and the answers have no common beginning"),
        ({"chosen": ASKED + GOOD, "rejected": ASKED + GOOD}, "no answer that differs"),
    ],
)
def test_a_record_that_is_no_pair_is_refused_by_its_column(record: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        packed(record)


def test_pairs_are_looked_for_where_they_are_asked_for_alone(tmp_path: Path) -> None:
    both = [
        {**chat, "chosen": chat["messages"] + ASKED + GOOD, "rejected": chat["messages"] + ASKED + BAD}
        for chat in chats(60)
    ]
    path = str(write_records(tmp_path / "both.jsonl", both))
    options = {"sequence_length": 1024, "isolate_documents": True, "heldout_fraction": 0.2}
    plain = load_corpus(DataOptions(path, **options), TOKENIZER, 300, tmp_path / "cache")
    pairs = load_corpus(
        DataOptions(path, samples=SampleOptions(groups=4), reads=(PAIRS,), **options),
        TOKENIZER,
        300,
        tmp_path / "cache",
    )
    assert plain.notes[0].startswith("records with messages")
    assert pairs.notes[0] == "records with chosen, rejected; trained on: the chosen answer against the rejected"
    only = str(write_records(tmp_path / "only.jsonl", [{"prompt": "1", "chosen": "a", "rejected": "b"}] * 9))
    with pytest.raises(UserError, match="with an --objective such as dpo"):
        load_corpus(DataOptions(only, **options), TOKENIZER, 300, tmp_path / "cache")
    chat = str(write_records(tmp_path / "chats.jsonl", chats(9)))
    with pytest.raises(UserError, match="prompt, chosen and rejected"):
        load_corpus(
            DataOptions(chat, samples=SampleOptions(groups=4), reads=(PAIRS,), **options),
            TOKENIZER,
            300,
            tmp_path / "cache",
        )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"objective": "ppo"}, "--objective ppo"),
        ({"objective": "dpo", "beta": 0}, "--beta 0"),
        ({"beta": 0.2}, "--objective sft"),
        ({"objective": "dpo", "simpo_gamma": 0.7}, "--objective simpo"),
        ({"objective": "simpo", "simpo_gamma": -1}, "--simpo_gamma -1"),
        ({"objective": "dpo", "streaming": True}, "--streaming True with the objective dpo"),
        ({"objective": "orpo", "train_on_prompt": True}, "--train_on_prompt True with the objective orpo"),
        ({"objective": "orpo", "overflow": "split"}, "--overflow split with the objective orpo"),
        ({"objective": "ipo", "text_column": "text"}, "--text_column text with the objective ipo"),
        ({"objective": "ipo", "split_special_tokens": False}, "--split_special_tokens False with the objective ipo"),
    ],
)
def test_what_an_objective_cannot_be_combined_with_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments("any", **options)
    assert TrainingArguments("any", objective="orpo", streaming=True).isolate_documents
