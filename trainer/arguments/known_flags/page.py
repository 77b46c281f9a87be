"""The table as a page of docs."""

from collections.abc import Iterator, Mapping

from shardwright.arguments.known_flags.entry import MISSING, OURS, UNNEEDED, Entry, word
from shardwright.arguments.known_flags.table import TABLE

HEAD = """# Flags of other trainers

What becomes here of the arguments that people know from transformers, trl, peft, LLaMA-Factory and axolotl: in a
command, in a [`--config` file](run.md#a-run-is-a-file), in `TrainingArguments(…)`, and in
[`scripts/port.py`](run.md#from-another-trainer). This page is written by
`python scripts/measure/flags_page.py > docs/flags.md`, from the table in `trainer/arguments/known_flags/`.

- An option is named: it means the same, and is set.
- *Not needed*: it is taken and has no effect, and the command says so and why.
- *Not to be had*: it is refused, with what to use instead. All that a command can't take is named in one answer.

A value that asks for nothing (`false`, `none`, `0`) is taken of any argument, and nothing is said.

"""


def page() -> str:
    """The page in Markdown: for each source a table of its arguments, those with one outcome in one row."""
    return HEAD + "\n".join(_section(source, entries) for source, entries in TABLE.items())


def counts() -> dict[str, dict[str, int]]:
    """Source → kind → how many of its arguments."""
    kinds = (OURS, UNNEEDED, MISSING)
    return {
        source: {kind: sum(entry.kind == kind for entry in entries.values()) for kind in kinds}
        for source, entries in TABLE.items()
    }


def _section(source: str, entries: Mapping[str, Entry]) -> str:
    rows: dict[str, list[str]] = {}
    for name, entry in entries.items():
        rows.setdefault("; ".join(_cells(name, entry)), []).append(f"`{name}`")
    lines = [f"| {', '.join(names)} | {text} |" for text, names in rows.items()]
    return "\n".join([f"## {source}", "", "| theirs | here |", "|---|---|", *lines, ""])


def _cells(name: str, entry: Entry) -> Iterator[str]:
    """The entry of ``name`` in words, and each of its values that has one of its own."""
    if said := _said(entry):
        yield "the option of that name" if said == f"`--{name}`" else said
    own: dict[str, list[str]] = {}
    for value, each in entry.at.items():
        own.setdefault(_said(each), []).append(f"`{value or '(empty)'}`")
    for text, values in own.items():
        yield f"{', '.join(values)}: {text}"


def _said(entry: Entry) -> str:
    if entry.kind == UNNEEDED:
        return f"not needed: {entry.why}" if entry.why else ""
    if entry.kind == MISSING:
        return f"not to be had: {entry.why}; instead: {entry.instead}"
    options = [f"`--{name} {word(value)}`" for name, value in entry.options.items()]
    options += [f"`--{name} {word(value)}` where nothing else says it" for name, value in entry.fill.items()]
    first = [f"behind `--{entry.name}`" if entry.suffix else f"`--{entry.name}`"] if entry.name else []
    return ", ".join([*first, *options, *([entry.why] if entry.why else [])])
