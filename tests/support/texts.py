"""Texts for the tests of data, written in every kind of file, and loaded."""

from __future__ import annotations

import csv
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, DatasetDict
from transformers import PreTrainedTokenizerBase

from shardwright.data.corpus import Corpus, DataOptions, load_corpus
from shardwright.data.records.document_stream import find_stream
from shardwright.data.rows.heldout_rows import split_documents
from shardwright.objectives.objective import text_shape

TEXTS = [f"Story {i}.\n" + " ".join(f"{i * j % 97} is a number," for j in range(5 + i % 11)) for i in range(300)]


def write_jsonl(path: Path, texts: list[str] = TEXTS, column: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({column: text, "number": i}) + "\n" for i, text in enumerate(texts)))
    return path


def write_json(path: Path) -> Path:
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    return path


def write_parquet(path: Path, texts: list[str] = TEXTS) -> Path:
    pq.write_table(pa.table({"text": pa.array(texts, pa.string())}), path)
    return path


def write_csv(path: Path, texts: list[str] = TEXTS) -> Path:
    with path.open("w", newline="", encoding="utf-8-sig") as file:  # a mark of byte order in front, as spreadsheets do
        table = csv.writer(file)
        table.writerows([["text", "number"], *([text, i] for i, text in enumerate(texts))])
    return path


def write_arrow(path: Path, texts: list[str] = TEXTS) -> Path:
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.ipc.new_file(path, table.schema) as file:
        file.write_table(table)
    return path


def write_saved_dataset(path: Path) -> Path:
    """A folder as `datasets` saves one, with a held-out split."""
    splits = {"train": TEXTS[:200], "test": TEXTS[200:]}
    DatasetDict({name: Dataset.from_dict({"text": texts}) for name, texts in splits.items()}).save_to_disk(path)
    return path


def write_text(path: Path) -> Path:
    path.write_text("".join(TEXTS) + "\n" * 3 + "".join(text + "\n" for text in TEXTS))
    return path


def write_folder(path: Path) -> Path:
    for i, text in enumerate(TEXTS):
        folder = path / f"part{i % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{i}.md").write_text(text)
    (path / ".hidden").mkdir()
    (path / ".hidden" / "config.jsonl").write_text("{}")
    (path / "picture.png").write_bytes(b"\x89PNG\xff")
    return path


def write_record_folder(path: Path) -> Path:
    write_jsonl(path / "a" / "first.jsonl", TEXTS[:150])
    write_jsonl(path / "b" / "second.jsonl", TEXTS[150:])
    return path


def written(path: Path, content: bytes) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    return path


def documents_of(dataset: Path | str | None, scratch: Path, fraction: float = 0.05) -> dict[str, Dataset]:
    """``train`` and ``heldout`` documents of ``dataset``."""
    found = find_stream(None if dataset is None else str(dataset), [text_shape()], stored=True)
    return split_documents(found, scratch, fraction)


def run_python(script: str, **environment: str) -> str:
    """Runs ``script`` in a process of its own; returns what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def load_small(
    cache_dir: Path | None,
    dataset: Path | str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    vocab_size: int = 300,
    **options: Any,
) -> Corpus:
    """The corpus of ``dataset``, in rows of 32 tokens if ``options`` (of `DataOptions`) do not say otherwise."""
    return load_corpus(
        DataOptions(dataset=str(dataset), **{"sequence_length": 32, **options}), tokenizer, vocab_size, cache_dir
    )


def write_mixed(path: Path) -> Path:
    write_jsonl(path / "a.jsonl")
    (path / "notes.md").write_text("text")
    return path


def one_bad_record(path: Path, part: bytes = b"\x93 is a number") -> Path:
    """Texts of which the eighth has a byte that is no UTF-8, as JSON-lines, Parquet or text."""
    content = write_jsonl(path).read_bytes() if path.suffix == ".jsonl" else "\n".join(TEXTS).encode()
    if path.suffix == ".parquet":
        texts = [text.encode() + (b"\x93" if i == 7 else b"") for i, text in enumerate(TEXTS)]
        column = pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())
        pq.write_table(pa.table({"text": column}), path)
        return path
    lines = content.split(b"\n")
    lines[7] = lines[7].replace(b" is a number", part, 1)
    return written(path, b"\n".join(lines))


# what is wrong: (writes such a dataset into a folder and returns its name, what the error says was found)
BAD = {
    "absent": (lambda d: d / "absent.jsonl", r"no such file or folder: .*absent\.jsonl"),
    "absent folder": (lambda d: f"{d}/absent/", "no such file or folder"),
    "empty file": (lambda d: written(d / "x.txt", b""), "an empty file"),
    "empty folder": (lambda d: written(d / "none" / ".keep", b"").parent, "nothing in any file that ends in"),
    "blank": (lambda d: written(d / "x.txt", b"\n \n"), "0 documents with text"),
    "one short document": (lambda d: write_jsonl(d / "x.jsonl", ["alone"]), "1 train documents of 2 tokens in all"),
    "not UTF-8": (lambda d: written(d / "x.txt", b"caf\xe9\n" * 99), r"UnicodeDecodeError.*0xe9"),
    "one record not UTF-8": (lambda d: one_bad_record(d / "x.jsonl"), r"x\.jsonl, row 8: .*(UTF-?8|utf-8)"),
    "one record of Parquet not UTF-8": (
        lambda d: one_bad_record(d / "x.parquet"),
        r"x\.parquet, row 8: .*(UTF-?8|utf-8)",
    ),
    "one line not UTF-8": (lambda d: one_bad_record(d / "x.txt"), r"x\.txt, line 8: .*utf-8"),
    "packed": (
        lambda d: written(d / "x.jsonl.gz", gzip.compress(b'{"text": "a"}\n')),
        r"a packed file, x\.jsonl\.gz\n(.*\n)*.*gzip -d ",
    ),
    "packed beside others": (
        lambda d: written(write_jsonl(d / "m" / "x.jsonl").with_name("y.jsonl.zst"), b"a").parent,
        r"a packed file, y\.jsonl\.zst",
    ),
    "malformed JSON": (lambda d: written(d / "x.jsonl", b'{"text": nope\n'), "no JSON: Expecting value"),
    "malformed CSV": (lambda d: written(d / "x.csv", b'text\n"a,b\n'), r"x\.csv, row 1: line 2: unexpected end"),
    "too many cells": (
        lambda d: written(d / "x.csv", b"text,n\na,1\nb,2,3\n"),
        r"x\.csv, row 2: line 3: 3 cells under 2 names",
    ),
    "malformed Arrow": (
        lambda d: written(d / "x.arrow", b"ARROWjunk"),
        r"x\.arrow, row 1 \(it can't be read at all\): Arrow",
    ),
    "malformed Parquet": (lambda d: written(d / "x.parquet", b"PAR1junk"), "[Pp]arquet"),
    "null": (lambda d: written(d / "x.jsonl", b'{"text": "a"}\n null\n'), r"x\.jsonl, row 2: null, not an object"),
    "null alone": (lambda d: written(d / "x.json", b"null"), "null, not an object"),
    "null first": (lambda d: written(d / "x.json", b'[null, {"text": "a"}]'), r"x\.json, row 1: null, not an object"),
    "no rows": (lambda d: write_parquet(d / "x.parquet", []), "no rows"),
    "a table of tabs": (lambda d: written(d / "x.tsv", b"prompt\tcompletion\na\tb\n"), r"instead: a .csv file"),
    "a table of semicolons": (
        lambda d: written(d / "x.csv", b"prompt;completion\na;b\n"),
        r"stands ';'\n  instead: .*read_csv\(path, sep=';'\)",
    ),
    "records without an ending": (lambda d: written(d / "x", b'{"text": "a"}\n'), r"instead: .*mv \S+/x \S+/x\.jsonl,"),
    "numbers as text": (
        lambda d: written(d / "x.jsonl", b'{"prompt": "2 + 2?", "completion": 4}\n'),
        r"completion \(int64\)\n  why not: completion has to be text\n  instead: each record's completion written as",
    ),
    "mixed kinds": (lambda d: write_mixed(d / "m"), r"json \(a\.jsonl\), text \(notes\.md\)"),
    "other column": (lambda d: write_jsonl(d / "x.jsonl", column="body"), r"columns body \(string\), number \(int64\)"),
    "turns under another name": (
        lambda d: written(d / "x.jsonl", b'{"conversation": [{"role": "user", "content": "a"}], "id": "b"}\n'),
        "instead: --columns messages=conversation",
    ),
    "tokenised": (
        lambda d: written(d / "x.jsonl", b'{"input_ids": [1, 2]}\n'),
        r"tokens of another one",
    ),
    "on the hub": (lambda d: "someone/absent", "OfflineModeIsEnabled"),
    "too small": (lambda d: write_jsonl(d / "x.jsonl", ["a", "b", "c"]), "tokens in all"),
}
