"""Records as public datasets have them: read as they are, or by the option that the error offers, or refused in words.

Each line of `public_layouts.jsonl` is a dataset's record, with texts of our own, and what becomes of it: ``read``: the
option that reads it, which the error offers (in general words: ``offered``), empty where none need be; ``refused``: a
part of the reason.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset

from shardwright.arguments.training import TrainingArguments
from shardwright.data.corpus import Corpus, load_corpus
from shardwright.data.from_arguments import data_options
from shardwright.data.records.document_stream import find_stream
from shardwright.data.rows.mixture import shapes_of
from shardwright.errors import UserError
from tests.support.chats import CHATML, byte_tokenizer
from tests.support.jobs import SIZES, job_of

LAYOUTS = [json.loads(line) for line in Path(__file__).with_name("public_layouts.jsonl").read_text().splitlines()]


@pytest.fixture
def written(tmp_path: Path) -> Any:
    """Writes records into a file, in copies with other numbers."""

    def write(record: dict[str, Any], name: str = "records.jsonl", copies: int = 0) -> Path:
        path, text = tmp_path / name, json.dumps(record, ensure_ascii=False)
        copies = copies or max(30, 60_000 // len(text))
        path.write_text("".join(text.replace("§", str(number)) + "\n" for number in range(copies)))
        return path

    return write


def read(path: Path | str, **options: Any) -> Corpus:
    """The rows of a run with these options."""
    args = TrainingArguments(recipe="llama_fsdp", dataset=str(path), sequence_length=512, max_steps=2, **options)
    config = job_of("llama_fsdp", devices=8).facts.config
    found = replace(data_options(args, config), isolate_documents=True)
    return load_corpus(found, byte_tokenizer(CHATML), SIZES["vocab_size"])


def tokens(corpus: Corpus) -> Any:
    return corpus.train.read(np.arange(len(corpus.train)))["input_ids"].tolist()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout["dataset"])
def test_a_public_dataset_is_read_or_the_error_offers_the_option_that_reads_it(layout, written):
    path = written(layout["record"])
    objective = layout.get("objective", "sft")
    if "refused" in layout:
        with pytest.raises(UserError, match=layout["refused"]):
            read(path, objective=objective)
        return
    options = dict(re.findall(r"--(\w+) (\S+)", layout["read"]))
    if options:
        with pytest.raises(UserError) as refused:
            read(path, objective=objective)
        assert layout.get("offered", layout["read"]) in refused.value.instead
    assert len(read(path, objective=objective, **options).train)


def test_columns_under_other_names_make_the_rows_of_renamed_ones_stored_and_streamed(written):
    record = {"question": "asked §", "answer": "answered §", "instruction": "of another kind"}
    theirs = written(record, copies=100)
    ours = written({"instruction": "asked §", "output": "answered §"}, "ours.jsonl", copies=100)
    names = "instruction=question,output=answer"
    found = read(theirs, columns=names)
    assert tokens(found) == tokens(read(ours))
    assert any("records with instruction=question, output=answer" in note for note in found.notes)
    assert any("not read: instruction (str" in note for note in found.notes)
    assert tokens(read(theirs, columns="instruction=answer,output=question")) != tokens(found)  # not from its cache
    reads = TrainingArguments(recipe="llama_fsdp", columns=names).reads
    expected = [text for _, text in find_stream(str(ours)).documents()]
    held = Dataset.from_json(str(theirs))
    for each in (str(theirs), held, held.to_iterable_dataset()):
        assert [text for _, text in find_stream(each, reads).documents()] == expected


@pytest.mark.parametrize(
    ("columns", "found", "offered"),
    [
        ("instruction=qestion,output=answer", "there is no column qestion", "--columns instruction=question,output="),
        ("instruction=question,output=number", "output has to be text", "each record's output written as text"),
        ("input=context", "there is no column context", "--columns instruction=question,output=answer"),
        ("messages=turns", "there is no column turns", "--columns instruction=question,output=answer"),
    ],
)
def test_names_that_the_records_have_not_are_told_with_those_that_they_have(columns, found, offered, written):
    path = written({"question": "asked §", "answer": "answered §", "number": 1, "instruction": 2})
    with pytest.raises(UserError) as refused:
        read(path, columns=columns)
    assert found in refused.value.why
    assert offered in refused.value.instead


def test_in_a_mixture_names_are_those_of_the_sets_that_have_them_and_one_has(written):
    asked, plain = written({"question": "asked §", "answer": "answered §"}), {"instruction": "asked §", "output": "x"}
    both = f"{asked}:0.5,{written(plain, 'plain.jsonl')}:0.5"
    found = read(both, columns="instruction=question,output=answer", eval_dataset=str(asked))
    assert sum("records with instruction" in note for note in found.notes) == 2
    with pytest.raises(UserError, match=r"none of the names: records with instruction, output"):
        shapes_of(str(written(plain)), TrainingArguments(columns="instruction=question,output=answer").reads)
