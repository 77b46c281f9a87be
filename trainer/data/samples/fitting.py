"""Samples → rows of S tokens: whole samples side by side, best fit first, or one a row.

A row's samples have ``segment_ids`` 1, 2, … (0 is padding), and ``position_ids`` from 0 in each. Those of one record,
such as its two answers, are neighbours. Where places of a record stay empty, their numbers are left out.

Shape legend: B rows, S tokens in a row (``sequence_length``).
"""

import bisect
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.shapes import BadRecord
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, AnyPacker, Columns
from shardwright.data.samples.samples import Encoder, Group, Sample, SampleOptions, joined
from shardwright.data.samples.tally import BECAUSE, REASONS
from shardwright.data.samples.unpaired_answers import one_by_one
from shardwright.errors import UserError
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.distill import TEACHER, width
from shardwright.objectives.objective import RecordShape


class FittingObserver(Protocol):
    """Called for each record, by its number in the packer's call: why it is bad, or its sample and the pieces kept.

    Several answers of a record are joined into one sample.
    """

    def bad(self, number: int, bad: BadRecord) -> None: ...

    def made(self, number: int, sample: Sample, kept: Sequence[Sample]) -> None: ...


class SamplePacker(AnyPacker):
    """Records → rows of S tokens. It keeps nothing for the next call: the last row of each is filled up.

    Without ``isolate`` only rows of one sample can be made. ``place_of``: a record's file and row, for messages.
    """

    groups = 16  # the more, the fuller the rows

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        shape: RecordShape,
        sequence_length: int,
        options: SampleOptions,
        isolate: bool = True,
        place_of: Callable[[str], str] = lambda document: f"a record that begins {document[:60]!r}",
        watch: FittingObserver | None = None,
    ) -> None:
        super().__init__(tokenizer, sequence_length, isolate, labels=True)
        self.options, self.place_of, self.watch, self._documents = options, place_of, watch, list[str]()
        self.encoder = Encoder(tokenizer, shape, self.tally, self._bad, options)
        if options.taught is not None:
            self.widths = {TEACHER: width(options.taught)}
        self.padding = int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)

    def rows(self, documents: Sequence[str]) -> Columns:
        groups: list[Group] = []
        encoded = self._encoded(documents)
        for number, made in one_by_one(encoded, self.options.segments) if self.options.segments else encoded:
            self.tally["samples"] += 1
            kept = [group for group in self._fitted(documents[number], made) if _all_scored(group)]
            dropped = self.options.overflow == "drop" and _all_scored(made)
            self.tally["without target"] += not kept and not dropped
            groups += kept
            if self.watch is not None:
                self.watch.made(number, joined(made), [joined(group) for group in kept])
        lengths = [_length(group) for group in groups]
        bins = [[i] for i in range(len(groups))]
        if self.options.packing:
            bins = best_fit(lengths, self.length, self.options.groups)
        rows = [[groups[i] for i in numbers] for numbers in bins]
        self.tally["rows"] += len(rows)
        self.tally["tokens"] += sum(lengths)
        self.tally["scored"] += sum(sample.scored for group in groups for sample in group)
        return self._filled(rows)

    def _encoded(self, documents: Sequence[str]) -> Iterator[tuple[int, Group]]:
        """(number, samples) of the documents, tokenised a number of characters at a time."""
        for numbers in by_characters(documents, CHARACTERS_AT_ONCE):
            self._first, self._documents = numbers.start, [*documents[numbers.start : numbers.stop]]
            yield from ((numbers.start + number, made) for number, made in self.encoder(self._documents))

    def _fitted(self, document: str, group: Group) -> list[Group]:
        """``[group]``, or the groups that the overflow policy makes of one longer than a row."""
        length, size, policy = _length(group), self.length, self.options.overflow
        if length <= size:
            return [group]
        if policy == "error":
            raise UserError(
                asked=f"rows of {size} tokens (--overflow error)",
                found=f"{self.place_of(document)}: a {self.encoder.shape.unit} of {length} tokens",
                why="it does not fit into a row",
                instead=f"--sequence_length {length}, or another --overflow",
            )
        self.tally[policy] += 1
        if policy == "drop":
            return []
        if policy == "split":
            (sample,) = group
            return [(_part(sample, n, n + size),) for n in range(0, length, size)]
        # each of two answers gets the room that the other leaves, and at least half a row
        sizes = [max(size // len(group), size - (length - len(sample.tokens))) for sample in group]
        ends = [len(s.tokens) if policy == "truncate_left" else n for s, n in zip(group, sizes, strict=True)]
        return [tuple(_part(s, max(0, end - n), end) for s, n, end in zip(group, sizes, ends, strict=True))]

    def _filled(self, rows: Sequence[Sequence[Group]]) -> Columns:
        size = (len(rows), self.length)
        columns = {name: np.zeros(size, dtype=np.int32) for name in self.columns if name not in self.widths}
        columns |= {name: np.zeros((*size, wide), dtype=np.float32) for name, wide in self.widths.items()}
        columns["input_ids"][:], columns["labels"][:] = self.padding, IGNORE
        for row, own in enumerate(rows):
            start = 0
            for number, sample in _numbered(own, len(self.options.segments)):
                place = (row, slice(start, start := start + len(sample.tokens)))
                columns["input_ids"][place], columns["labels"][place] = sample.tokens, sample.labels
                columns["labels"][row, place[1].start] = IGNORE  # a first token is predicted from nothing
                if sample.taught is not None:  # at the position that predicts each
                    columns[TEACHER][row, place[1].start : place[1].stop - 1] = sample.taught[1:]
                if self.isolate:
                    columns["segment_ids"][place] = number
                    columns["position_ids"][place] = np.arange(len(sample.tokens))
        return columns

    def _bad(self, number: int, bad: BadRecord) -> None:
        self.tally["bad"] += 1
        reason = f"{BECAUSE}{bad.column}: {' '.join(bad.found.split())[:200]}"
        if reason in self.tally or sum(name.startswith(BECAUSE) for name in self.tally) < REASONS:
            self.tally[reason] += 1
        if self.watch is not None:
            self.watch.bad(self._first + number, bad)
        if self.options.on_bad_row == "error":
            raise UserError(
                asked=f"samples of {self.encoder.shape.name}",
                found=f"{self.place_of(self._documents[number])}, column {bad.column}: {bad.found}",
                why="no sample can be made of it",
                instead=f"{bad.instead}{'; or ' * bool(bad.instead)}the data mended, or --on_bad_row skip, which "
                "leaves such rows out and counts them",
            )


def by_characters(texts: Sequence[str], most: int) -> Iterator[range]:
    """Runs of the numbers of ``texts``, each of at most ``most`` characters, or of one text."""
    first, characters = 0, 0
    for number, text in enumerate(texts):
        if first < number and characters + len(text) > most:
            yield range(first, number)
            first, characters = number, 0
        characters += len(text)
    if texts:
        yield range(first, len(texts))


def _numbered(groups: Sequence[Group], places: int) -> Iterator[tuple[int, Sample]]:
    """(segment number, sample) of a row's samples. Each record has so many ``places``; 0: as many as it has samples."""
    for record, group in enumerate(groups):
        for place, sample in enumerate(group, start=1):
            yield record * (places or len(group)) + (sample.place or place), sample


def _length(group: Group) -> int:
    return sum(len(sample.tokens) for sample in group)


def _all_scored(group: Group) -> bool:
    return all(sample.scored for sample in group)


def _part(sample: Sample, start: int, end: int) -> Sample:
    taught = None if sample.taught is None else sample.taught[start:end]
    return Sample(sample.tokens[start:end], sample.labels[start:end], place=sample.place, taught=taught)


def best_fit(lengths: Sequence[int], size: int, most: int | None = None) -> list[list[int]]:
    """The numbers of the lengths in each bin of ``size``: longest first, each into the fullest bin with room.

    Best-fit decreasing (Johnson 1973) takes at most 11/9 of the fewest bins, and one. ``most``: lengths of a bin.
    """
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free, bin), sorted
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        at = bisect.bisect_left(room, (lengths[i], 0))
        free, chosen = room.pop(at) if at < len(room) else (size, len(bins))
        if chosen == len(bins):
            bins.append([])
        bins[chosen].append(i)
        if len(bins[chosen]) != most:
            bisect.insort(room, (free - lengths[i], chosen))
    return [sorted(numbers) for numbers in bins]
