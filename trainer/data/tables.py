"""Tables in CSV: a first line of names, then records of text.

Not read by `datasets`: pandas, which it uses, takes a cell "NA" for nothing and another's digits for a number, and
leaves its files open.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, Value

LONGEST_CELL = 1 << 30  # characters; the module's own limit, 131,072, is less than a long document


def stored_tables(splits: dict[str, list[Path]], scratch: Path) -> dict[str, Dataset]:
    """The records of each split's files.

    Raises:
        datasets.exceptions.DatasetGenerationError: from a ValueError, csv.Error or OSError that says what is wrong.
    """
    return {
        name: Dataset.from_generator(
            _records,
            gen_kwargs={"files": files},
            features=_features(files),
            cache_dir=str(scratch / name),
            fingerprint=name,
        )
        for name, files in splits.items()
    }


def streamed_tables(splits: dict[str, list[Path]]) -> dict[str, IterableDataset]:
    """The records of each split's files, each file a shard.

    Raises:
        ValueError, csv.Error, OSError: a first line of names can't be read.
    """
    return {
        name: IterableDataset.from_generator(_records, gen_kwargs={"files": files}, features=_features(files))
        for name, files in splits.items()
    }


def _features(files: Sequence[Path]) -> Features:
    with files[0].open(newline="", encoding="utf-8-sig") as file:
        names = next(csv.reader(file, strict=True), None)
    if not names or not all(names) or len({*names}) < len(names):
        raise ValueError(f"{files[0]} begins with {names}, which are no names of columns")
    return Features({name: Value("string") for name in names})


def _records(files: Sequence[Path]) -> Iterator[dict[str, str]]:
    names = list(_features(files))
    csv.field_size_limit(LONGEST_CELL)
    for path in files:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = csv.reader(file, strict=True)
            first = next(rows, [])
            if sorted(first) != sorted(names):
                raise ValueError(f"{path} has the columns {first}, and {files[0]} has {names}")
            try:
                for row in filter(None, rows):  # an empty line is no record
                    if len(row) != len(first):
                        raise ValueError(f"{len(row)} cells under {len(first)} names")
                    yield dict(zip(first, row, strict=True))
            except (csv.Error, ValueError) as error:
                if isinstance(error, UnicodeDecodeError):
                    raise
                raise ValueError(f"{path}, line {rows.line_num}: {error}") from error
