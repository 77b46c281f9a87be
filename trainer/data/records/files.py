"""Local JSON, CSV, Parquet and Arrow files, read a row at a time: each row is a record or the reason why it is none.

`datasets` does not serve: it reads nothing of a file with one bad row, and gives all records of a file the same columns
and types; pandas, which it uses for tables, takes a cell "NA" for nothing and digits for a number.
"""

import csv
import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardwright.errors import a_type

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
ROWS_AT_ONCE = 1024  # for Parquet and Arrow
LONGEST_CELL = 1 << 30  # characters; csv's own limit, 131,072, is less than a long document


class Unreadable(ValueError):
    """The reason why a row is no record. ``rest``: nothing behind it in its file can be read either."""

    def __init__(self, found: str, rest: bool = False) -> None:
        self.rest = rest
        super().__init__(found)


Row = Mapping[str, Any] | Unreadable | None  # None: an empty line


def rows_of(path: Path, kind: str, start: int = 0) -> Iterator[Row]:
    """The rows of a file from number ``start`` (from 0) on. Unreadable rows are yielded, not raised."""
    try:
        yield from _READERS[kind](path, start)
    except (OSError, ValueError, RecursionError, MemoryError, pa.ArrowException) as error:
        yield Unreadable(f"{type(error).__name__}: {error}", rest=True)


def _json(path: Path, start: int) -> Iterator[Row]:
    """One row a line (JSON-lines). A file that begins with a list, or a lone brace in its line, is read whole."""
    with path.open("rb") as file:
        file.seek(len(BYTE_ORDER_MARK) if file.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK else 0)
        at = file.tell()
        first = next((line for line in file if line.strip()), b"").strip()
        file.seek(at)
        if first.startswith(b"[") or first == b"{":
            yield from itertools.islice(_json_values(file.read().decode()), start, None)
            return
        for line in itertools.islice(file, start, None):
            yield _json_line(line)


def _json_line(line: bytes) -> Row:
    if not line.strip():
        return None
    try:
        return _object(json.loads(line.decode()))
    except UnicodeDecodeError as error:
        return Unreadable(f"UnicodeDecodeError: {error}")
    except (ValueError, RecursionError) as error:
        return Unreadable(f"no JSON: {error}")


def _json_values(text: str) -> Iterator[Row]:
    """The objects of concatenated JSON values, and of lists among them."""
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at].isspace():
            at += 1
        else:
            value, at = decoder.raw_decode(text, at)
            yield from map(_object, value if isinstance(value, list) else [value])


def _object(value: Any) -> Row:
    kind = "null" if value is None else f"{a_type(value)}"
    return value if isinstance(value, dict) else Unreadable(f"{kind}, not an object with columns")


def _csv(path: Path, start: int) -> Iterator[Row]:
    csv.field_size_limit(LONGEST_CELL)
    # bytes that are no UTF-8 stay in the cells, so that the rows behind them can be read
    with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
        rows = csv.reader(file, strict=True)
        names = next(rows, None)
        if names and not names[0] and len(names) > 1:
            names[0] = "Unnamed: 0"  # the index that pandas' to_csv writes, as pandas and datasets call it
        if not names or not all(names) or len({*names}) < len(names):
            raise ValueError(f"it begins with {names}, which are no names of columns")
        _check_utf8(names)
        yield from itertools.islice(_table(rows, names), start, None)


def _table(rows: Any, names: list[str]) -> Iterator[Row]:
    while True:
        try:
            row = next(rows)
            if row and len(row) != len(names):
                raise ValueError(f"{len(row)} cells under {len(names)} names")
            _check_utf8(row)
            yield dict(zip(names, row, strict=True)) if row else None
        except StopIteration:
            return
        except (csv.Error, ValueError) as error:
            yield Unreadable(f"line {rows.line_num}: {error}")


def _check_utf8(cells: list[str]) -> None:
    for cell in cells:
        cell.encode(errors="surrogateescape").decode()


def _parquet(path: Path, start: int) -> Iterator[Row]:
    """A damaged row group counts as unreadable from its first bad row on; the groups behind it are read."""
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            size, given = file.metadata.row_group(group).num_rows, start
            if start < size:
                try:
                    for row in _batches(file.iter_batches(ROWS_AT_ONCE, [group]), start):
                        yield row
                        given += 1
                except (OSError, ValueError, pa.ArrowException) as error:
                    yield Unreadable(f"{type(error).__name__}: {error}; nor the {size - given - 1:,} rows behind it")
                    yield from itertools.repeat(None, size - given - 1)
            start = max(0, start - size)


def _arrow(path: Path, start: int) -> Iterator[Row]:
    with pa.memory_map(str(path)) as source:
        try:
            stream = pa.ipc.open_stream(source)  # as `datasets` saves them
        except pa.ArrowInvalid:
            source.seek(0)
            file = pa.ipc.open_file(source)
            yield from _batches(map(file.get_batch, range(file.num_record_batches)), start)
        else:
            yield from _batches(stream, start)


def _batches(batches: Iterator[pa.RecordBatch], start: int) -> Iterator[Row]:
    for batch in batches:
        left, start = batch.slice(start), max(0, start - batch.num_rows)
        for first in range(0, left.num_rows, ROWS_AT_ONCE):
            piece = left.slice(first, ROWS_AT_ONCE)
            try:
                yield from piece.to_pylist()
            except (UnicodeDecodeError, OverflowError):
                yield from (_arrow_row(piece.slice(i, 1)) for i in range(piece.num_rows))


def _arrow_row(row: pa.RecordBatch) -> Row:
    try:
        return row.to_pylist()[0]
    except (UnicodeDecodeError, OverflowError) as error:
        return Unreadable(f"{type(error).__name__}: {error}")


_READERS = {"json": _json, "csv": _csv, "parquet": _parquet, "arrow": _arrow}
