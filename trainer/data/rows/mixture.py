"""Mixtures: rows of several sources, each with a weight: ``a.jsonl:0.7,b.jsonl:0.3``; without, by their sizes.

Each source gives its share of every thousand rows, in an order drawn by the seed. A source's own rows come in its own
order; once all are taken, it begins anew in another order. An epoch ends when every source was gone through.

Shape legend: S tokens in a row.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardwright.arguments.data_options import WEIGHTED
from shardwright.data.records.document_stream import check_evaluated, find_stream
from shardwright.data.records.record_sources import AnyDataset
from shardwright.data.records.shapes import option_of
from shardwright.data.rows.packing import Columns
from shardwright.data.rows.rows import Order, Rows, StoredRows, count_in
from shardwright.errors import UserError
from shardwright.objectives.objective import RecordShape

BLOCK = 1000  # rows, of which each source gives exactly its share


@dataclass(frozen=True)
class Source:
    """A dataset of ``--dataset``, and the rows that it gives of a thousand; None: by its size."""

    dataset: AnyDataset
    share: int | None = BLOCK


def sources_of(dataset: AnyDataset) -> list[Source]:
    """The datasets that ``--dataset`` names: one, or those of a mixture. An existing path is always one dataset.

    Without weights they are mixed by their sizes, each taken once in an epoch. Raises UserError if some have weights
    and others none, or a weight is not above 0.
    """
    if not isinstance(dataset, str) or "," not in dataset or os.path.exists(os.path.expanduser(dataset)):
        return [Source(dataset)]
    parts = dataset.split(",")
    found = [WEIGHTED.fullmatch(part.strip()) for part in parts]
    if not any(found) and all(part.strip() for part in parts):
        return [Source(part.strip(), None) for part in parts]
    if not all(found):
        whole = [f"{part.strip()}:0.5" for part, match in zip(parts, found, strict=True) if not match and part.strip()]
        raise UserError(
            asked=f"--dataset {dataset}",
            found="without a weight: " + ", ".join(p for p, match in zip(parts, found, strict=True) if not match),
            why="of a mixture each dataset says how much of it is drawn, or none does, and all are taken whole",
            instead="--dataset " + ",".join([*[match[0] for match in found if match], *whole]),
        )
    matches = [match for match in found if match]
    counts = shares([float(match[2]) for match in matches], dataset)
    return [Source(match[1], share) for match, share in zip(matches, counts, strict=True)]


def shares(weights: Sequence[float], dataset: str = "a mixture") -> list[int]:
    """Rows that each source gives of a thousand, by the largest remainder method; UserError if one gives none."""
    total = sum(weights)
    exact = [BLOCK * weight / total if 0 < total < math.inf else 0.0 for weight in weights]
    counts = [math.floor(each) for each in exact]
    for i in sorted(range(len(exact)), key=lambda i: (counts[i] - exact[i], i))[: BLOCK - sum(counts)]:
        counts[i] += 1
    if not (all(counts) and any(exact)):
        raise UserError(
            asked=f"--dataset {dataset}",
            found=f"the weights {', '.join(map(str, weights))}",
            why=f"of {BLOCK:,} rows a dataset would give none",
            instead="weights that are at least a thousandth of their sum, or a mixture without that dataset",
        )
    return counts


def shares_of(sources: Sequence[Source], rows: Sequence[Rows]) -> list[int]:
    """The shares of the sources; where they have none by their ``rows``, so that an epoch takes each of them once.

    Raises UserError for streams, whose lengths show where they end.
    """
    given = [source.share for source in sources if source.share is not None]
    if given:
        return given
    counts = [len(each) for each in rows if isinstance(each, StoredRows)]
    if len(counts) < len(rows):
        names = [str(source.dataset) for source in sources]
        raise UserError(
            asked=f"--dataset {','.join(names)}, with --streaming",
            found="no weights",
            why="they would be mixed by their sizes, and the length of a stream shows where it ends",
            instead=f"--dataset {','.join(f'{name}:1' for name in names)}; or no --streaming",
        )
    least = 2 * sum(counts) / BLOCK  # a smaller dataset comes more than once
    return shares([max(count, least) for count in counts])


def shapes_of(dataset: AnyDataset, reads: Sequence[RecordShape]) -> list[RecordShape]:
    """The shape of the records of each dataset that ``--dataset`` names; raises as :func:`find_stream`."""
    found = [find_stream(source.dataset, reads).shape for source in sources_of(dataset)]
    if reads[0].names and not any(shape.names for shape in found):
        raise UserError(
            asked=f"--dataset {dataset} {option_of(reads[0])}",
            found=f"none of the names: records with {'; and '.join(shape.read_as for shape in found)}",
            why="the option would have no effect",
            instead="no --columns",
        )
    return found


def parts_of(
    sources: Sequence[Source],
    shapes: Sequence[RecordShape],
    evaluated: Mapping[str, AnyDataset],
    reading: tuple[Sequence[RecordShape], str],
) -> list[dict[str, Any]]:
    """Each source's own options: its dataset, and what is held out beside it: the sets ``evaluated`` of its shape.

    Of a source that has none nothing is held out. Raises UserError for a set that is of no source's shape.
    """
    found = {name: find_stream(each, *reading, option="eval_dataset") for name, each in evaluated.items()}
    for stream in found.values():
        check_evaluated(shapes, stream)
    parts = []
    for source, shape in zip(sources, shapes, strict=True):
        own = {name: evaluated[name] for name, stream in found.items() if stream.shape.name == shape.name}
        none = {"heldout_fraction": 0.0} if evaluated and not own else {}
        parts.append({"dataset": source.dataset, "eval_dataset": own, **none})
    return parts


def no_tokenizer(dataset: object) -> UserError:
    return UserError(
        asked=f"--dataset {dataset}, without a tokenizer",
        found="one would have to be trained on the mixture",
        why="one is trained on a single dataset of text",
        instead="--tokenizer with a hub id or a folder, or a --model that brings its own",
    )


@dataclass(frozen=True)
class MixedRows:
    """Rows of several sources with the same columns. ``shares``: rows that each gives of a thousand."""

    sources: Sequence[Rows]
    shares: Sequence[int]

    @property
    def fingerprint(self) -> str:
        parts = (f"{share}‰ {rows.fingerprint}" for share, rows in zip(self.shares, self.sources, strict=True))
        return f"a mixture of {'; '.join(parts)}"

    @property
    def tokens(self) -> int | None:
        """Tokens of an epoch, to a thousand rows; None if a source is streamed."""
        return self._of_an_epoch([rows.tokens for rows in self.sources if rows.tokens is not None])

    @property
    def rows(self) -> int | None:
        """Rows of an epoch, to a thousand; None if a source is streamed."""
        return self._of_an_epoch([len(rows) for rows in self.sources if isinstance(rows, StoredRows)])

    def _of_an_epoch(self, counts: Sequence[int]) -> int | None:
        """The count of an epoch by those of the stored sources."""
        if len(counts) < len(self.sources):
            return None
        return max(-(-BLOCK * count // share) for count, share in zip(counts, self.shares, strict=True))

    def order(self, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> MixedOrder:
        return MixedOrder(self, seed, batch_size, cursor)

    def token_counts(self, vocab_size: int) -> np.ndarray:
        """Each source's counts, so often as its rows come beside the others', to the nearest whole number."""
        sizes = [rows.tokens or BLOCK for rows in self.sources]
        per_row = [share / size for share, size in zip(self.shares, sizes, strict=True)]
        times = [max(1, round(weight / min(per_row))) for weight in per_row]
        found = (n * rows.token_counts(vocab_size) for n, rows in zip(times, self.sources, strict=True))
        return sum(found, np.zeros(vocab_size, dtype=int))


class MixedOrder:
    """The sources' orders, interleaved by their shares; marks are (source, its own mark)."""

    def __init__(self, rows: MixedRows, seed: int, batch_size: int, cursor: Mapping[str, Any]) -> None:
        self._shares, self._seed, self._row = rows.shares, seed, count_in(cursor, "row")
        given = cursor.get("sources")
        if given is None:  # the beginning of an epoch, for each of them
            self._row, given = 0, [{"epoch": count_in(cursor, "epoch"), "row": 0}] * len(rows.sources)
        self._orders: list[Order] = [
            source.order(seed, max(1, batch_size * share // BLOCK), each)
            for source, share, each in zip(rows.sources, rows.shares, given, strict=True)
        ]
        self._drawn = self._draw()

    @property
    def epoch(self) -> float:
        return min(order.epoch for order in self._orders)

    def take(self, count: int) -> list[tuple[int, Any]]:
        taken: list[tuple[int, Any]] = []
        epoch = int(self.epoch)
        while len(taken) < count and int(self.epoch) == epoch:
            source = int(self._drawn[self._row % BLOCK])
            taken += [(source, mark) for mark in self._orders[source].take(1)]
            self._row += 1
            if self._row % BLOCK == 0:
                self._drawn = self._draw()
        return taken

    def read(self, taken: Sequence[tuple[int, Any]]) -> Columns:
        numbers = np.array([source for source, _ in taken])
        values: Columns = {}
        for source in np.unique(numbers).tolist():
            places = np.flatnonzero(numbers == source).tolist()
            for name, found in self._orders[source].read([taken[i][1] for i in places]).items():
                rows = values.setdefault(name, np.empty((len(taken), found.shape[1]), dtype=found.dtype))
                rows[places] = found
        return values

    def cursor(self) -> dict[str, Any]:
        return {"epoch": int(self.epoch), "row": self._row, "sources": [order.cursor() for order in self._orders]}

    def _draw(self) -> np.ndarray:
        sources = np.repeat(np.arange(len(self._shares)), self._shares)
        return np.random.default_rng([self._seed, self._row // BLOCK]).permutation(sources)


def mixture_notes(sources: Sequence[Source], train: MixedRows, notes: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    lines = []
    for source, share, rows, own in zip(sources, train.shares, train.sources, notes, strict=True):
        line = f"{source.dataset}: {share / BLOCK:.1%} of the rows"
        if rows.tokens is not None and train.tokens is not None:
            times = train.tokens * share / BLOCK / rows.tokens
            line += f"; {rows.tokens:,} tokens, taken {times:.2f} times in an epoch"
        lines += [line, *(f"  {note}" for note in own)]
    return tuple(lines)
