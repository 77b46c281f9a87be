"""The command behind `scripts/data.py`: audits the data that a run's options name, and shows the findings."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, TextColumn
from transformers import PreTrainedTokenizerBase

from shardwright.arguments.training import TrainingArguments
from shardwright.data.audit import DECIDE, SAID, WRONG, Audit, audit, histogram
from shardwright.data.audit_arguments import AuditArguments
from shardwright.data.corpus import load_corpus
from shardwright.data.from_arguments import asked_tokenizer, check_records, data_options
from shardwright.data.records.document_stream import DocumentStream
from shardwright.data.rows.mixture import shapes_of, sources_of
from shardwright.data.samples.samples import Sample
from shardwright.errors import UserError
from shardwright.files.asked_file import check_outputs, write_asked
from shardwright.layout.auto import AUTO, UNMADE
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.meta_model import load_config
from shardwright.models.ops.labels import IGNORE
from shardwright.report.audit_report import AuditView, Finding, audit_page, print_audit
from shardwright.report.bars import TimesColumn
from shardwright.report.lines import say, waiting
from shardwright.report.notebook import live_progress
from shardwright.report.units import size

TRAINS_WRONGLY = 3  # the exit code


def run_audit(args: TrainingArguments, shown: AuditArguments, console: Console) -> int:
    """Audit the data of ``args``; returns the exit code.

    Raises UserError if a run would refuse the options before reading, or a file can't be written.
    """
    datasets = [*(each.dataset for each in sources_of(args.dataset)), *args.eval_sets.values()]
    inputs = vars(args) | {f"dataset {n}": each for n, each in enumerate(datasets)}
    check_outputs({"--html": shown.html, "--json": shown.json}, "it is written once all data is read", inputs)
    config = load_config(args.model, UNMADE if args.recipe == AUTO else load_recipe(args.recipe))
    tokenizer = asked_tokenizer(args, config)
    shapes = shapes_of(args.dataset, args.reads)
    check_records(args, shapes)
    if not all(shape.is_text for shape in shapes):
        args = dataclasses.replace(args, isolate_documents=True)  # as a run does
    options = data_options(args, config)
    if tokenizer is None:  # the one that a run trains, which then finds it in the cache
        lenient = dataclasses.replace(options, samples=dataclasses.replace(options.samples, on_bad_row="skip"))
        with waiting(console, "training a tokenizer on the data …"):
            words = config.get_text_config().vocab_size
            with contextlib.suppress(UserError):
                tokenizer = load_corpus(lenient, None, words).tokenizer
            # nothing is left without the bad rows: the run's own refusal names the first of them
            tokenizer = tokenizer or load_corpus(options, None, words).tokenizer
    shows = ReadingBar(console)
    with shows.bar:
        found = audit(options, tokenizer, shown.show, shows.read)
    view = view_of(found, args, tokenizer)
    print_audit(console, view)
    if args.max_steps > 0 and (words := args.schedule(1.0).notice):  # epochs become steps with a run's devices
        say(console, f"rate:    {words}")
    _write(shown.html, "html", lambda: audit_page(view))
    _write(shown.json, "json", lambda: json.dumps(as_json(found), indent=2, ensure_ascii=False) + "\n")
    return TRAINS_WRONGLY if found.wrong else 0


class ReadingBar:
    """A bar for each dataset, on a terminal or in a notebook. It counts bytes of files, or characters without files."""

    def __init__(self, console: Console) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[done]}"),
            TimesColumn(),
        )
        self.bar = live_progress(*columns, console=console, transient=True)
        self._stream: DocumentStream | None = None

    def read(self, stream: DocumentStream, part: int, characters: int) -> None:
        """Advance the bar: the ``read`` of :func:`shardwright.data.audit.audit`."""
        sizes = stream.sizes
        if stream is not self._stream:
            self._stream, self._part, self._characters = stream, 0, 0
            self._task = self.bar.add_task(stream.asked, total=sum(sizes) or None, done="")
        if part != self._part and sizes:
            self._part, self._characters = part, 0
        self._characters += characters
        # a file's text is about as long as the file; a compressed file's is longer, so it is capped at the file's size
        within = min(self._characters, sizes[part]) if part < len(sizes) else 0
        done = sum(sizes[:part]) + within if sizes else self._characters
        text = size(done) if sizes else f"{done:,} characters"
        self.bar.update(self._task, completed=done, done=text)


def _write(path: str | None, name: str, text: Callable[[], str]) -> None:
    if path is not None:
        write_asked(path, f"--{name}", text())


def view_of(found: Audit, args: TrainingArguments, tokenizer: PreTrainedTokenizerBase) -> AuditView:
    """The audit as titles, tables and texts to print."""
    header = ("dataset", "records", "samples", "rows", "full", "tokens", "scored", "share of rows")
    sources = []
    for source in found.sources:
        samples, rows, tokens, scored = (source.tally[name] for name in ("samples", "rows", "tokens", "scored"))
        name = source.name + (" (held out)" if source.heldout else "")
        full = f"{min(tokens / (rows * found.length), 1):.1%}" if rows else ""
        of_tokens = f"{scored:,} ({scored / max(tokens, 1):.1%})"
        share = "" if source.heldout else f"{source.share:.1%}"
        counts = (f"{samples:,}", f"{rows:,}", full, f"{tokens:,}", of_tokens, share)
        sources.append((name, source.shape.name, *counts))
    findings = [
        Finding(name, meaning, name in WRONG, each.count, each.places, DECIDE.get(name, ""))
        for name, meaning in {**WRONG, **SAID}.items()
        if (each := found.findings.get(name))
    ]
    lengths = [n for source in found.sources for n in source.lengths]
    facts = [
        ("tokens a row", f"{found.length:,}"),
        ("tokenizer", str(tokenizer.name_or_path) or "trained on the data"),
        ("--overflow", args.overflow),
        ("--on_bad_row", args.on_bad_row),
        ("longest sample", f"{max(lengths, default=0):,} tokens"),
        ("median sample", f"{int(np.median(lengths)) if lengths else 0:,} tokens"),
    ]
    shown = [
        (f"{source.name}: {place}", [*pieces_of(sample, tokenizer)])
        for source in found.sources
        for place, sample in source.shown
    ]
    title = f"Data of {args.dataset or 'the standard library'}"
    return AuditView(title, facts, header, sources, histogram(lengths, found.length), findings, shown)


def pieces_of(sample: Sample, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[str, bool]]:
    """Pieces of a sample's text, cut where the loss begins and ends: (text, whether the loss is on it)."""
    scored = sample.labels != IGNORE
    edges = [0, *(np.flatnonzero(np.diff(scored)) + 1).tolist(), len(scored)]
    for a, b in itertools.pairwise(edges):
        yield str(tokenizer.decode(sample.tokens[a:b])), bool(scored[a])


def as_json(found: Audit) -> dict[str, Any]:
    return {
        "sequence_length": found.length,
        "sources": [
            {
                "dataset": source.name,
                "shape": source.shape.name,
                "heldout": source.heldout,
                "share": source.share,
                **source.tally,
                "fill": source.tally["tokens"] / max(source.tally["rows"] * found.length, 1),
                "lengths": histogram(source.lengths, found.length),
            }
            for source in found.sources
        ],
        "findings": {
            name: {"wrong": name in WRONG, **dataclasses.asdict(findings)} for name, findings in found.findings.items()
        },
        "exit_code": TRAINS_WRONGLY if found.wrong else 0,
    }
