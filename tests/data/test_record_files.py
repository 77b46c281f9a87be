"""Broken files: what can't be read is named by file and row, or left out and counted, and all else is read."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shardwright.data.corpus import Corpus
from shardwright.data.records.document_stream import find_stream
from shardwright.data.records.files import Unreadable, rows_of
from shardwright.data.records.record_sources import locate
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.samples.fitting import SampleOptions
from shardwright.errors import UserError
from shardwright.objectives.objective import text_shape
from tests.support.texts import TEXTS, load_small, one_bad_record, write_csv, write_jsonl, write_parquet

TEXT = [text_shape()]

SKIP = SampleOptions(on_bad_row="skip")


def cut_line(path: Path) -> Path:
    lines = write_jsonl(path).read_bytes().split(b"\n")
    lines[7] = lines[7][:-9]
    path.write_bytes(b"\n".join(lines))
    return path


def cut_parquet(path: Path) -> Path:
    """Three groups of rows, the second of which is damaged."""
    table = pa.table({"text": [f"{text} {'x' * 50}" for text in TEXTS]})
    pq.write_table(table, path, row_group_size=100, compression="none", use_dictionary=False)
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(1).column(0).data_page_offset
    data[start : start + 40] = b"\xff" * 40
    path.write_bytes(bytes(data))
    return path


def torn_csv(path: Path) -> Path:
    lines = write_csv(path, [f"The text {i}." for i in range(300)]).read_bytes().split(b"\r\n")
    lines[8] = b"one,two,three"
    path.write_bytes(b"\r\n".join(lines))
    return path


# what is written → (its name, how many rows are left out, where)
BROKEN: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "a line that was cut": (cut_line, "x.jsonl", "1 (x.jsonl, row 8)"),
    "a line that is no UTF-8": (one_bad_record, "x.jsonl", "1 (x.jsonl, row 8)"),
    "a row of Parquet that is no UTF-8": (one_bad_record, "x.parquet", "1 (x.parquet, row 8)"),
    "a line of a text that is no UTF-8": (one_bad_record, "x.txt", "1 (x.txt, row 8)"),
    "a row of a table with too many cells": (torn_csv, "x.csv", "1 (x.csv, row 8)"),
    "Parquet that is damaged in the middle": (cut_parquet, "x.parquet", "1 (x.parquet, row 101)"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_what_can_not_be_read_is_left_out_counted_and_said_also_from_the_cache(
    tmp_path: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    write, name, words = BROKEN[case]
    path = write(tmp_path / name)
    with pytest.raises(UserError, match=rf"{name}, (row|line) "):
        load_small(tmp_path / "cache", path)
    for _ in range(2):
        note, *others = load_small(tmp_path / "cache", path, samples=SKIP).notes
        assert note == f"rows that can't be read, left out: {words}"
        assert all(re.fullmatch(r"not read: number \(\w+, 299\)", other) for other in others)
    assert f"left out: {name}, row " in caplog.text


def test_all_rows_but_the_bad_ones_are_read_stored_and_streamed(tmp_path: Path) -> None:
    path = cut_line(tmp_path / "x.jsonl")
    stored = load_small(tmp_path / "cache", path, samples=SKIP, heldout_fraction=0.2)
    text = stored.tokenizer.decode(
        list(itertools.chain(*stored.train.dataset["input_ids"], *stored.heldout.dataset["input_ids"]))
    )
    missing = {i for i in range(300) if f"Story {i}.\n" not in text}
    assert 7 in missing
    assert len(missing) <= 3, "and what fills no row"
    stream = find_stream(str(path), TEXT, "skip")
    assert [found for _, found in stream.documents()] == [*TEXTS[:7], None, *TEXTS[8:]]
    assert [found for _, found in stream.read(0, 6)] == [TEXTS[6], None, *TEXTS[8:]]


def test_a_stream_with_bad_rows_goes_on_exactly(tmp_path: Path) -> None:
    def load() -> Corpus:
        return load_small(tmp_path / "cache", path, streaming=True, shuffle_rows=8, samples=SKIP)

    path = cut_line(tmp_path / "x.jsonl")
    batches, again = TrainingBatches(load().train, 2, seed=0), TrainingBatches(load().train, 2, seed=0)
    for _ in range(50):
        next(batches)
    again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
    for _ in range(100):
        assert next(batches)["input_ids"].tolist() == next(again)["input_ids"].tolist()


def test_a_file_that_can_not_be_opened_is_named_or_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    write_parquet(folder / "a.parquet")
    (folder / "b.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(UserError, match=r"b\.parquet, row 1 \(it can't be read at all\): Arrow"):
        load_small(tmp_path / "cache", folder)
    (note,) = load_small(tmp_path / "cache", folder, samples=SKIP).notes
    assert "b.parquet, row 1 (it can't be read at all)" in note


def test_a_text_file_among_others_that_is_no_utf8_is_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for i in range(30):
        (folder / f"{i}.txt").write_text(TEXTS[i])
    (folder / "3.txt").write_bytes(b"\xff" * 9)
    (note,) = load_small(tmp_path / "cache", folder, samples=SKIP).notes
    assert "1 (3.txt (it can't be read at all))" in note


@pytest.mark.parametrize(
    ("content", "rows"),
    [
        (b'{"a": 1}\n\n{"a": 2}', [{"a": 1}, None, {"a": 2}]),
        (b'\xef\xbb\xbf{"a": 1}\n', [{"a": 1}]),
        (b'[\n{"a": 1},\n{"a": [{}]}\n]', [{"a": 1}, {"a": [{}]}]),
        (b'{\n "a": [\n  {"b": 1},\n  {"b": 2}\n ]\n}', [{"a": [{"b": 1}, {"b": 2}]}]),
        (b"", []),
    ],
)
def test_json_is_read_in_lines_or_whole(tmp_path: Path, content: bytes, rows: list[object]) -> None:
    path = tmp_path / "x.ndjson"
    path.write_bytes(content)
    assert not content or getattr(locate(str(path)), "kind", "") == "json"
    assert list(rows_of(path, "json")) == rows
    assert list(rows_of(path, "json", 1)) == rows[1:]


def test_what_follows_a_line_nested_too_deep_is_read(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"a": 0}\n{"a": ' + b"[" * 100_000 + b'\n{"a": 2}\n')
    first, deep, last = rows_of(path, "json")
    assert (first, last) == ({"a": 0}, {"a": 2})
    assert isinstance(deep, Unreadable)


def test_records_may_differ_in_their_columns_and_types(tmp_path: Path) -> None:
    """As `datasets` can't read them: a content that is text in one message and parts in another."""
    path = tmp_path / "x.jsonl"
    parts = [{"type": "text", "text": "b"}]
    records = [{"messages": [{"role": "user", "content": content}]} for content in ("a", parts)]
    path.write_text("".join(json.dumps({**record, str(i): i}) + "\n" for i, record in enumerate(records)))
    assert [json.loads(text or "") for _, text in find_stream(str(path)).documents()] == records


def test_groups_of_parquet_behind_a_damaged_one_are_read_from_any_row_on(tmp_path: Path) -> None:
    path = cut_parquet(tmp_path / "x.parquet")
    rows = list(rows_of(path, "parquet"))
    assert [isinstance(row, dict) for row in rows] == [True] * 100 + [False] * 100 + [True] * 100
    assert "nor the 99 rows behind it" in str(rows[100])
    for start in (7, 100, 200, 299, 300):
        assert list(map(str, rows_of(path, "parquet", start))) == list(map(str, rows[start:]))


@pytest.mark.parametrize("name", ["lines.jsonl", "rows.parquet"])
def test_files_without_rows_are_told_so_by_the_option_that_named_them(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name.endswith(".jsonl"):
        file.write_text("\n\n")
    else:
        pq.write_table(pa.table({"text": pa.array([], pa.string())}), file)
    for option in ("dataset", "eval_dataset"):
        with pytest.raises(UserError) as refused:
            find_stream(str(file), option=option)
        assert refused.value.asked.startswith(f"--{option} ")
        assert refused.value.found == "no rows"
