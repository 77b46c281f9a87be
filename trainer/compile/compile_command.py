"""The compile command, for `scripts/compile.py` and `train.py --compile_only`."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import signal
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.errors import UserError
from shardwright.files.asked_file import check_outputs, write_asked
from shardwright.report.lines import Terminal, say, waiting

if TYPE_CHECKING:
    from shardwright.compile.compile_job import CompileJob
    from shardwright.compile.report.report import CompileReport
    from shardwright.compile.search.search import Trial


DOES_NOT_FIT = 3


def main(words: list[str], description: str | None) -> int:
    """`scripts/compile.py`: runs its command line, and returns the exit code."""
    os.environ.update(PJRT_DEVICE="CPU", CPU_NUM_DEVICES="1")  # no accelerator; before torch_xla opens one
    logging.disable(logging.WARNING)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: leaves no compiling process and no files
    args, options = parse([TrainingArguments, CompileArguments], words, description)
    import transformers

    transformers.logging.set_verbosity_error()
    return run(args, options)


def run(args: TrainingArguments, options: CompileArguments, console: Console | None = None) -> int:
    """Compiles the run's graphs, prints and writes the report. Returns 0 if all fit, else :data:`DOES_NOT_FIT`.

    Raises:
        UserError: bad options, recipe or model; no libtpu; a compiler that failed.
    """
    from shardwright.compile.compile_job import CompileJob
    from shardwright.compile.report.compile_terminal import print_report
    from shardwright.compile.report.options_to_try import options_to_try
    from shardwright.compile.search.remat_share import compile_auto
    from shardwright.compile.search.search import search
    from shardwright.compile.search.tune import tune
    from shardwright.layout.plan_warnings import plan_warnings
    from shardwright.step.auto_remat import is_auto

    console = console or Terminal()
    if options.topology is None:
        raise UserError(
            asked="a compile for a TPU",
            found="no --topology",
            why="how a step is split, and whether it fits, depends on the chips and their links",
            instead="--topology v5p:4x4x4, or another of libtpu's names",
        )
    outputs = {"--report": options.report, "--json": options.json}
    check_outputs(outputs, "it is written after minutes of compiling", vars(args))
    job, tried = tune(args, options, console) if options.tune else (CompileJob.of(args, options), [])
    for text in filter(None, (job.job.copies, *plan_warnings(job.job.plan))):
        say(console, f"plan:    {text}")
    for text in job.job.notices:
        say(console, f"layers:  {text}")
    if auto := is_auto(job.job):
        job, report = compile_auto(job, console)
    else:
        with waiting(console, f"compiling for {options.topology} …"):
            report = job.compile()
    print_report(report, console)
    if not (options.tune or options.search):
        rows = job.job.args.per_device_train_batch_size
        for text in options_to_try(report, job.job.recipe.compute.remat, job.flags, rows):
            say(console, f"try:     {text}")
    _write(report, job, console, tried)
    if options.search:
        tried, most = [], None
        try:
            most = search(job, report, console, tried, auto)
        finally:  # also of a search that was stopped
            _write(report, job, console, tried, most)
    return 0 if report.fits else DOES_NOT_FIT


def _write(
    report: CompileReport, job: CompileJob, console: Console, tried: Sequence[Trial], most: int | None = None
) -> None:
    """Writes the page and the JSON, with a search's trials and the largest batch that fits."""
    from shardwright.compile.report.compile_page import page

    options = job.options
    if options.report:
        write_asked(options.report, "--report", page(report, job.title, [trial.cells for trial in tried]))
        say(console, f"page:    {options.report}")
    if options.json:
        plain = report.as_json()
        if tried:
            plain["tried"] = [dataclasses.asdict(trial) for trial in tried]
        if most is not None:
            plain["largest_batch"] = most
        write_asked(options.json, "--json", json.dumps(plain, indent=2) + "\n")
        say(console, f"json:    {options.json}")
