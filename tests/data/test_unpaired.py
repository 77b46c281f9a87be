"""Answers one by one: every form of record, places by their labels, and mismatched answers beside them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from shardwright.data.records.shapes import recognise
from shardwright.data.samples.fitting import SampleOptions, SamplePacker
from shardwright.data.samples.tally import notes
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.kto import KahnemanTversky
from shardwright.objectives.objective import BAD, GOOD, MISMATCHED
from tests.support.chats import CHATML, byte_tokenizer

TOKENIZER = byte_tokenizer(CHATML, "<|im_end|>")
ASKED, GIVEN = {"role": "user", "content": "one?"}, {"role": "assistant", "content": "two"}
KTO, APO = (GOOD, BAD, MISMATCHED), (GOOD, BAD)


def packer_of(record: dict[str, Any], length: int = 256, **options: Any) -> SamplePacker:
    from datasets import Dataset

    shape = recognise(Dataset.from_list([record]).features, "these", KahnemanTversky.shapes)
    return SamplePacker(TOKENIZER, shape, length, SampleOptions(**{"groups": 4, "segments": KTO, **options}))


def packed(*records: dict[str, Any], **options: Any) -> list[dict[int, tuple[str, str]]]:
    """The text of each row that is not scored, and the text that is, by the numbers of its segments."""
    packer = packer_of(records[0], **options)
    columns = packer.rows([str(packer.encoder.shape.document(record)) for record in records])
    names = ("input_ids", "labels", "segment_ids", "position_ids")
    return [dict(segments(*each)) for each in zip(*(columns[name] for name in names), strict=True)]


def segments(tokens: Any, labels: Any, numbers: Any, positions: Any) -> Iterator[tuple[int, tuple[str, str]]]:
    for number in sorted({*numbers.tolist()} - {0}):
        where = numbers == number
        assert positions[where].tolist() == list(range(where.sum()))
        answer = labels[where] != IGNORE
        yield number, (TOKENIZER.decode(tokens[where][~answer]), TOKENIZER.decode(tokens[where][answer]))


def strings(*labels: object) -> list[dict[str, Any]]:
    return [{"prompt": f"{i}?", "completion": "abcdef"[i], "label": label} for i, label in enumerate(labels)]


def test_a_record_has_the_place_that_its_label_gives_it_and_another_records_answer_beside_it() -> None:
    end = "<|im_end|>"
    (row,) = packed(*strings(True, False, True), length=64)
    first, second = {1: ("0?", f"a{end}"), 3: ("0?", f"c{end}")}, {5: ("1?", f"b{end}"), 6: ("1?", f"a{end}")}
    assert row == {**first, **second, 7: ("2?", f"c{end}"), 9: ("2?", f"b{end}")}
    (row,) = packed(*strings(True, False, True), length=64, segments=APO)
    assert row == {1: ("0?", f"a{end}"), 4: ("1?", f"b{end}"), 5: ("2?", f"c{end}")}


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [ASKED], "completion": [GIVEN], "label": False},
        {"messages": [ASKED, GIVEN], "label": 0},
        {"messages": [ASKED, GIVEN], "kto_tag": False},
    ],
)
def test_messages_are_rendered_by_the_chat_template_and_the_last_one_is_the_answer(record: dict[str, Any]) -> None:
    asked = TOKENIZER.apply_chat_template([ASKED], tokenize=False, add_generation_prompt=True)
    (row,) = packed(record, segments=APO)
    assert row == {2: (asked + "\n", "two<|im_end|>")}


def test_pairs_are_two_examples_each_and_neighbours_with_one_prompt_do_not_get_one_anothers_answers() -> None:
    pairs = [{"prompt": f"{i}?", "chosen": f"yes {i}", "rejected": f"no {i}"} for i in range(4)]
    rows = packed(*pairs, length=512, groups=8)
    assert [len(row) for row in rows] == [16]
    answers = [row for row in rows[0].values() if "yes" in row[1] or "no" in row[1]]
    own = [answer for number, answer in rows[0].items() if number % 3]
    mismatched = [answer for number, answer in rows[0].items() if not number % 3]
    assert len(answers) == 16
    assert all(asked[0] in said for asked, said in own)
    assert not any(asked[0] in said for asked, said in mismatched)
    assert sorted(said for _, said in own) == sorted(said for _, said in mismatched)


def test_both_segments_of_a_record_are_cut_alike_and_it_is_dropped_if_one_loses_its_answer() -> None:
    records = strings(True, True)
    records[0]["completion"] = "x" * 40
    rows = packed(*records, length=32)
    assert rows[0] == {1: ("0?", "x" * 26), 3: ("0?", "b<|im_end|>")}
    records[1]["prompt"] = "p" * 20
    packer = packer_of(records[0], length=32)
    packer.rows([str(packer.encoder.shape.document(record)) for record in records])
    assert packer.tally["without target"] == 1
    assert (packer.tally["samples"], packer.tally["rows"]) == (2, 1)


def test_the_same_records_make_the_same_rows_and_good_and_bad_ones_are_counted() -> None:
    rng = np.random.default_rng(0)
    records = [{**r, "prompt": "p" * int(rng.integers(1, 9))} for r in strings(1, 0, 1, 1, 0, 1)]
    made = []
    for _ in range(2):
        packer = packer_of(records[0], length=48)
        made.append(packer.rows([str(packer.encoder.shape.document(record)) for record in records]))
    assert all((values == made[1][name]).all() for name, values in made[0].items())
    said = notes(packer.encoder.shape, packer.tally, 48)
    assert said[0].startswith("6 examples in ")
    assert "good answers: 4, bad ones: 2" in said


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"prompt": "p", "completion": "a", "label": 2}, "column label: 2, where an answer is a good one, true, or"),
        ({"prompt": "p", "completion": [GIVEN], "label": True}, "column completion: messages behind a prompt"),
        ({"messages": [GIVEN], "label": True}, "column messages: a single one"),
        ({"prompt": "p", "completion": "a", "label": "yes"}, "label has to be true or false"),
        ({"messages": [ASKED, GIVEN]}, "prompt, completion and label, which is true for a good"),
    ],
)
def test_a_record_that_says_not_whether_its_answer_is_good_is_refused(record: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        packed(record)
