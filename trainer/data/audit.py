"""The audit: makes samples of all records with a run's own code, and names those that would train wrongly. Pure CPU."""

import hashlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from shardwright.data.corpus import DataOptions, check_samples, check_special_names
from shardwright.data.records.document_stream import DocumentStream, check_evaluated, find_stream, has_text
from shardwright.data.records.fields import is_meant, unread_of
from shardwright.data.records.shapes import BadRecord
from shardwright.data.rows.mixture import BLOCK, shapes_of, sources_of
from shardwright.data.rows.packing import CHARACTERS_AT_ONCE, DOCUMENTS_AT_ONCE
from shardwright.data.samples.fitting import SamplePacker
from shardwright.data.samples.samples import Encoder, Sample
from shardwright.objectives.objective import RecordShape

LISTED = 1000  # most places kept of a finding; all are counted
# called after each group of documents with their stream, the part of it where they end (at the end of a stream: the
# number of its parts), and their characters
Read = Callable[[DocumentStream, int, int], None]

# finding → its meaning. WRONG makes the audit fail, SAID is only reported.
WRONG = {
    "bad row": "no sample can be made of it",
    "unreadable": "no record can be read there",
    "template parts": "the chat template renders what is before a turn otherwise with it",
    "unscored": "no token of the sample is trained on",
    "no stop token": "a turn behind which the template writes no token that ends a generation",
    "unknown role": "a role that chat templates don't know",
    "lost": "a field that says what to learn, or that the model is to see, has no effect",
    "too long": "longer than a row, with --overflow error",
    "nothing": "nothing to train on",
}
SAID = {
    "cut": "longer than a row: cut or split by --overflow",
    "dropped": "longer than a row: dropped by --overflow",
    "left out": "a bad row, by --on_bad_row skip",
    "no text": "nothing stands in it",
    "not read": "a field without effect on tokens or labels",
    "special name": "texts that hold the name of a special token, spelt as letters",
    "merged": "the prompt's last token runs on into the completion, and is scored",
    "turn alone": "a turn that the chat template writes otherwise once the chat goes on: a sample of its own",
    "earlier turn": "a turn before a chat's last: not trained on, by --train_on last",
    "duplicate": "the very tokens of an earlier sample",
    "held out too": "the very tokens of a sample that is trained on",
}
# in a sample's counts → the finding, and its details
_COUNTED = {
    "turns without stop": ("no stop token", "{turns without stop} of its {turns} turns"),
    "merged": ("merged", ""),
    "turns alone": ("turn alone", "turns: {turns alone}"),
    "earlier turns": ("earlier turn", "turns: {earlier turns}"),
}
# finding of SAID → the reader's choice; of the others there is none
DECIDE = {
    "cut": "do the parts still teach what they should? If not: a longer --sequence_length, or --overflow drop",
    "dropped": "may they be missing? If not: a longer --sequence_length, or --overflow split",
    "left out": "may they be missing? If not: mend them; without --on_bad_row skip a run stops at the first",
    "no text": "should something stand there? A run leaves them out",
    "not read": "does the field hold what the model should see or learn? Then rename it to one that is read, or write "
    "it into the text",
    "special name": "is it talk about the token, or the token? --split_special_tokens says which",
    "merged": "should the completion begin with a token of its own? Then end the prompt, or begin the completion, with "
    "a space or a line end",
    "turn alone": "is every answer to be learned, each as the model saw it, though the template forgets its reasoning "
    "afterwards? All are by default, as the families' published recipes do; --train_on last takes each chat's last "
    "answer",
    "earlier turn": "is the last answer all that a chat shall teach? --train_on all takes each of them",
    "duplicate": "should these samples count twice? If not: take the copies out",
    "held out too": "an evaluation on them measures learning by heart: another --eval_dataset, or take the copies out",
}


@dataclass
class Findings:
    """The count of one finding, and its first places, each with details."""

    count: int = 0
    places: list[tuple[str, str]] = field(default_factory=list)


@dataclass
class SourceAudit:
    """The result for one dataset."""

    name: str
    shape: RecordShape
    heldout: bool  # it is evaluated on, not trained on
    share: float  # of the rows of a mixture
    tally: Counter[str] = field(default_factory=Counter)  # as a SamplePacker counts
    lengths: array = field(default_factory=lambda: array("q"))  # tokens of each sample, before any is cut
    shown: list[tuple[str, Sample]] = field(default_factory=list)  # samples to show: (place, the sample after cutting)


@dataclass
class Audit:
    """The result for all datasets."""

    length: int
    sources: list[SourceAudit]
    findings: dict[str, Findings]  # by keys of WRONG and SAID

    @property
    def wrong(self) -> dict[str, Findings]:
        """The findings that would train wrongly or stop the run."""
        return {name: found for name, found in self.findings.items() if name in WRONG}


class _Auditor:
    """Reads streams, and notes the fate of each record: it watches the packer of their samples."""

    def __init__(self, options: DataOptions, tokenizer: PreTrainedTokenizerBase, show: int, read: Read) -> None:
        self.options, self.tokenizer, self.show, self.read = options, tokenizer, show, read
        self.found = Audit(options.sequence_length, [], {})
        self.first: dict[bytes, tuple[str, bool]] = {}  # hash of a sample's tokens → its place, whether held out
        self.places: list[str] = []  # of the records in the group being packed
        self.prefix = ""  # of places, if there are several datasets
        self.source: SourceAudit

    def note(self, finding: str, place: str, found: str = "") -> None:
        findings = self.found.findings.setdefault(finding, Findings())
        findings.count += 1
        if len(findings.places) < LISTED:
            findings.places.append((place, found))

    def bad(self, number: int, bad: BadRecord) -> None:
        skipped = self.options.samples.on_bad_row == "skip"
        finding = "template parts" if bad.parts else "left out" if skipped else "bad row"
        instead = f" (instead: {bad.instead})" if bad.instead else ""
        self.note(finding, self.places[number], f"column {bad.column}: {bad.found}{instead}")

    def made(self, number: int, sample: Sample, kept: Sequence[Sample]) -> None:
        place, length, policy = self.places[number], len(sample.tokens), self.options.samples.overflow
        if length > self.options.sequence_length:
            finding = {"error": "too long", "drop": "dropped"}.get(policy, "cut")
            self.note(finding, place, f"{length:,} tokens")
        if not kept and (policy != "drop" or not sample.scored):
            self.note("unscored", place, f"of {length:,} tokens" + (", once it was cut" if sample.scored else ""))
        for name, count in sample.counts.items():
            if name.startswith("unknown role"):
                self.note("unknown role", place, name.removeprefix("unknown role "))
            elif count and name in _COUNTED:
                finding, words = _COUNTED[name]
                self.note(finding, place, words.format_map(sample.counts))
        for name, _ in unread_of(sample.counts):
            self.note("lost" if is_meant(name) else "not read", place, name)
        self._keep(place, sample, kept)

    def _keep(self, place: str, sample: Sample, kept: Sequence[Sample]) -> None:
        """Keep the sample's length, its hash, and the first of the pieces ``kept`` of it, if it is to be shown."""
        self.source.lengths.append(len(sample.tokens))
        key = hashlib.blake2b(sample.tokens.tobytes(), digest_size=12).digest()
        first, held = self.first.setdefault(key, (place, self.source.heldout))
        if first != place:
            self.note("held out too" if self.source.heldout and not held else "duplicate", place, f"as {first}")
        if len(self.source.shown) < self.show:
            self.source.shown += [(place, piece) for piece in kept[:1]]

    def audit(self, stream: DocumentStream, heldout: bool, share: float, most: int | None) -> None:
        """Audit the first ``most`` documents (None: all), in the groups in which a run packs stored rows."""
        self.source = SourceAudit(stream.asked.removeprefix("--dataset "), stream.shape, heldout, share)
        self.found.sources.append(self.source)
        add, size = self._adder(stream.shape)
        texts: list[str] = []

        def add_group(part: int) -> None:
            add(texts)
            self.read(stream, part, sum(map(len, texts)))
            texts.clear()
            self.places.clear()

        count, characters = 0, 0
        for part in range(stream.parts):
            name, unreadable = stream.name_of(part), len(stream.unread.places)
            for row, (_, text) in enumerate(stream.read(part, 0), start=1):
                if count == most:
                    break
                count += 1
                place = f"{self.prefix}{name}, row {row}"
                if text and has_text(text):
                    self.places.append(place)
                    texts.append(text)
                    characters += len(text)
                elif len(stream.unread.places) == unreadable and stream.shape.is_text:
                    self.note("no text", place)
                unreadable = len(stream.unread.places)
                if len(texts) == size or characters >= size // DOCUMENTS_AT_ONCE * CHARACTERS_AT_ONCE:
                    add_group(part)
                    characters = 0
        add_group(stream.parts)
        if not heldout and not self.source.tally["scored"]:
            self.note("nothing", self.source.name, "no scored token in any record")
        if count := self.source.tally["special names"]:
            self.note("special name", self.source.name, f"in {count:,} texts")

    def _adder(self, shape: RecordShape) -> tuple[Callable[[list[str]], object], int]:
        """The function that takes a group of documents, and the size of a group."""
        options, length = self.options, self.options.sequence_length
        if options.makes_samples(shape):
            lenient = replace(options.samples, on_bad_row="skip")
            if lenient.overflow == "error":
                lenient = replace(lenient, overflow="truncate_right")
            packer = SamplePacker(self.tokenizer, shape, length, lenient, options.isolate_documents, watch=self)
            self.source.tally = packer.tally
            return packer.rows, DOCUMENTS_AT_ONCE * packer.groups
        tally = self.source.tally
        encoder = Encoder(self.tokenizer, shape, tally, self.bad, options.samples)

        def add(texts: list[str]) -> None:
            """Joined texts fill every row, and every token is scored."""
            for number, (sample,) in encoder(texts):
                tally.update(samples=1, tokens=len(sample.tokens), scored=len(sample.tokens))
                self._keep(self.places[number], sample, [Sample(sample.tokens[:length], sample.labels[:length])])
            tally["rows"] = tally["tokens"] // length

        return add, DOCUMENTS_AT_ONCE


def audit(
    options: DataOptions,
    tokenizer: PreTrainedTokenizerBase,
    show: int = 0,
    read: Read = lambda stream, part, characters: None,
) -> Audit:
    """Read all records that a run of ``options`` would, including those to evaluate on, and keep ``show`` of a source.

    Raises UserError if a run would refuse the options before reading.
    """
    auditor = _Auditor(options, tokenizer, show, read)
    asked: list[tuple[Any, bool, float]] = [
        *((source.dataset, False, (source.share or 0) / BLOCK) for source in sources_of(options.dataset)),
        *((dataset, True, 1.0) for dataset in options.eval_dataset.values()),
    ]
    shapes = shapes_of(options.dataset, options.reads)
    for each in options.eval_dataset.values():
        check_evaluated(shapes, find_stream(each, *options.reading, option="eval_dataset"))
    for name, heldout, share in asked:
        stream = find_stream(name, options.reads, "list", option="eval_dataset" if heldout else "dataset")
        check_samples(options, stream.shape, tokenizer)
        check_special_names(options, stream, tokenizer)
        auditor.prefix = f"{name}: " if len(asked) > 1 else ""
        auditor.audit(stream, heldout, share, None if heldout else options.max_samples)
        for given in () if options.eval_dataset else stream.heldout.values():
            auditor.audit(given, True, share, None)
        for column, count in stream.unread.columns.items():
            auditor.note(
                "lost" if is_meant(column) else "not read", f"column {column}", f"in {count:,} records of {name}"
            )
        unreadable = "left out" if options.samples.on_bad_row == "skip" else "unreadable"
        for place, why in stream.unread.places.items():
            auditor.note(unreadable, auditor.prefix + place, why)
    trained = [source for source in auditor.found.sources if not source.heldout]
    rows = sum(source.tally["rows"] for source in trained)
    for source in (source for source in trained if not source.share and rows):  # mixed by their sizes
        source.share = source.tally["rows"] / rows
    return auditor.found


def histogram(lengths: Sequence[int], length: int) -> list[tuple[str, int]]:
    """Counts of samples by their number of tokens: (range, count), each range about as wide as its middle.

    The row's ``length`` is an edge, which separates the samples that do not fit.
    """
    if not len(lengths):
        return []
    top = max(lengths)
    edges = {n for k in range(3, 64) for n in (2**k, 3 * 2 ** (k - 1)) if n < top * 1.5} | {0, length}
    bounds = sorted(edge for edge in edges if edge < max(top, length) * 1.5)
    while bounds[-1] < top:
        bounds.append(top)
    counts, _ = np.histogram(np.asarray(lengths) - 0.5, bounds)
    found = [(f"{a + 1:,} to {b:,}", int(n)) for a, b, n in zip(bounds, bounds[1:], counts, strict=False)]
    used = [i for i, (_, n) in enumerate(found) if n]
    return found[used[0] : used[-1] + 1]
