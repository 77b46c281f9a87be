"""The table as pages of docs."""

from collections.abc import Iterator, Mapping

from shardwright.arguments.known_flags.entry import MISSING, UNNEEDED, Entry, word
from shardwright.arguments.known_flags.table import TABLE

HEAD = """# Flags of other trainers

```
python scripts/port.py train.sh        # a published command, in these options
```

What becomes here of the arguments that people know from transformers, trl, peft, LLaMA-Factory and axolotl: in a
command, in a [`--config` file](../options.md#a-run-is-a-file), in `TrainingArguments(…)`, and in
[`scripts/port.py`](../options.md#from-another-trainer). `python scripts/measure/reference_pages.py` writes these pages,
from the table in `trainer/arguments/known_flags/`.

- An option is named: it means the same, and is set.
- *Not needed*: it is taken and has no effect, and the command says so and why.
- *Not to be had*: it is refused, with what to use instead. All that a command can't take is named in one answer.

A value that asks for nothing (`false`, `none`, `0`) is taken of any argument, and nothing is said. What LLaMA-Factory
and axolotl pass on to transformers' Trainer by the same name is on its page.

| flags of | |
|---|---|
"""
# page → its title, and the beginnings of the sources that are on it
PAGES = {
    "flags_transformers.md": ("Flags of transformers", ("transformers",)),
    "flags_trl.md": ("Flags of trl", ("trl",)),
    "flags_llama_factory.md": ("Flags of peft and LLaMA-Factory", ("peft", "LLaMA-Factory")),
    "flags_axolotl.md": ("Flags of axolotl", ("axolotl",)),
}


def pages() -> dict[str, str]:
    """File in docs/reference → its text: for each source a table of its arguments, those with one outcome in a row."""
    found, index = {}, []
    for file, (title, begins) in PAGES.items():
        sources = {source: entries for source, entries in TABLE.items() if source.startswith(begins)}
        head = f"# {title}\n\n```\npython scripts/port.py train.sh\n```\n\n[What the words mean](flags.md).\n\n"
        found[file] = head + "\n".join(_section(source, entries) for source, entries in sources.items())
        index.append(f"| {', '.join(sources)} | [{title.lower()}]({file}) |")
    return {"flags.md": HEAD + "\n".join(index) + "\n", **found}


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
    first = f"{'behind ' if entry.suffix else ''}`--{entry.name}`" if entry.name else ""
    return ", ".join(filter(None, [first, *options, entry.why]))
