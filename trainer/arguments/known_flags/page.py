"""The table as a page of docs."""

from collections.abc import Iterator, Mapping

from shardwright.arguments.known_flags.entry import MISSING, OURS, UNNEEDED, Entry, word
from shardwright.arguments.known_flags.table import TABLE

HEAD = """# Flags of other trainers

Arguments that people know from transformers, trl, peft, LLaMA-Factory and axolotl, and what becomes of them here: in a command, in a
[`--config` file](run.md#a-run-is-a-file), in `TrainingArguments(…)` and in [`scripts/port.py`](run.md#from-another-trainer). This page is written by
`python scripts/measure/flags_page.py > docs/flags.md`; the table itself is in `trainer/arguments/known_flags/`.

- An option is named: it means the same, and is set.
- *Not needed*: it is taken, has no effect, and the command says so and why. A value that asks for nothing (`false`, `none`, `0`) is taken silently, of any argument.
- *Not to be had*: it is refused, with what to use; a command's are all named at once.

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
    rows: list[tuple[list[str], Entry]] = []
    for name, entry in entries.items():
        alike = next((names for names, other in rows if other is entry), None)
        if alike is None:
            rows.append(([name], entry))
        else:
            alike.append(name)
    lines = [
        f"| {', '.join(f'`{name}`' for name in names)} | {'; '.join(_cells(names, entry))} |" for names, entry in rows
    ]
    return "\n".join([f"## {source}", "", "| theirs | here |", "|---|---|", *lines, ""])


def _cells(names: list[str], entry: Entry) -> Iterator[str]:
    """An entry in words, and each of its values that has one of its own."""
    if said := _said(entry):
        yield said
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
    options = [f"`--{name} {word(value)}`" for name, value in {**entry.options, **entry.fill}.items()]
    first = [f"behind `--{entry.name}`" if entry.suffix else f"`--{entry.name}`"] if entry.name else []
    return ", ".join([*first, *options, *([entry.why] if entry.why else [])])
