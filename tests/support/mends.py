"""The `instead` of a UserError, applied: each alternative that is a line, an option or a word makes another request."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from shardwright.errors import UserError

_LINE = re.compile(r'"([^"{}\n]+)": (\{[^{}]*\})')
_OPTION = re.compile(r"(no )?--(\w+)(?: ('[^']*'|(?!--|(?:and|for|in|lists|or|that|to|which|with)\b)[^\s;]+))?")
_CHOICES = 3  # that are tried of a list


@dataclass(frozen=True)
class Request:
    """A recipe's file and the options of a command beside it (None: given without a value)."""

    source: str = ""
    options: Mapping[str, object] | None = None
    devices: int = 8

    def with_options(self, **options: object) -> Request:
        return replace(self, options={**(self.options or {}), **options})

    def without(self, *names: str) -> Request:
        return replace(self, options={k: v for k, v in (self.options or {}).items() if k not in names})


def mended(asked: Request, error: UserError) -> dict[str, Request]:
    """The text of each alternative in ``error.instead`` that can be applied → the request with it."""
    found = {}
    for text in _alternatives(error.instead):
        for mend, request in _applied(text, asked, error):
            if request != asked:
                found[mend] = request
    return found


def _alternatives(instead: str) -> Iterator[str]:
    """The parts of an `instead`, of which one is to be taken."""
    for part in re.split(r"(?<=\?) |, or\s+|; or\s+| or (?=[\w\"-]+[=:]|--|Mesh|an? |no )|; ", instead):
        if part.strip():
            yield part.strip()


def _applied(text: str, asked: Request, error: UserError) -> Iterator[tuple[str, Request]]:
    source = asked.source
    if match := re.match(r"did you mean '([^']+)'(?: by '([^']+)')?", text):
        yield match[0], _word(asked, error, match[1], match[2])
    elif match := re.match(r"in place of '([^']+)':", text):
        lines = "".join(f"        {line[0]},\n" for line in _LINE.finditer(text))
        yield text, replace(asked, source=_without_line(source, match[1].replace("\\\\", "\\"), lines))
    elif match := re.match(r"no line '([^']+)'", text):
        yield match[0], replace(asked, source=_without_line(source, match[1], ""))
    elif match := re.match(r"one of:? (.*)", text):
        for choice in match[1].split(", ")[:_CHOICES]:
            yield f"one of {choice}", _word(asked, error, choice.strip("'"), None)
    elif match := re.match(r"(\d+) devices", text):
        yield match[0], replace(asked, devices=int(match[1]))
    elif _LINE.search(text):
        for pattern, layout in _LINE.findall(text):
            source = _with_line(source, pattern, layout)
        yield text, replace(asked, source=source)
    elif match := re.match(r'"(\w+)": (Shard\(\d+\))', text):
        changed = re.sub(rf'"{match[1]}": (?!Shard\(\d+\)[,}}])[^,}}]+', match[0], source, count=1)
        yield match[0], replace(asked, source=changed)
    elif match := re.search(r"(?:^|such as )(Mesh\([^()]*\))", text):
        yield match[1], replace(asked, source=re.sub(r"(?<=mesh=)Mesh\([^()]*\)", match[1], source))
    elif match := re.match(r"from shardwright import .*", text):
        yield match[0], replace(asked, source=re.sub(r"from \w+ import .*", match[0], source))
    elif match := re.match(r"recipe = .*", text):
        yield match[0], replace(asked, source=f"{source}\n{match[0]}\n")
    elif text.startswith(("--", "no --")):
        barred = re.findall(r"--(\w+)[^\n]*: not to be had", error.found)
        yield _options(text, asked.without(*barred))
    elif match := re.match(r"(\w+)=(\([^()]*\)|[\w.\"'-]+)", text):
        yield match[0], _argument(asked, *match.groups())


def _options(text: str, asked: Request) -> tuple[str, Request]:
    """``--name value --name`` are given, ``no --name`` is taken away; ``--name with …`` is prose."""
    found, said = asked, []
    for match in _OPTION.finditer(text):
        if match[3] is None and text[match.end() :].startswith(" with "):
            continue
        value = True if match[3] is None else match[3].strip("'").rstrip(",")
        found = found.without(match[2]) if match[1] else found.with_options(**{match[2]: value})
        said.append(match[0].rstrip(","))
    return " ".join(said), found


def _argument(asked: Request, name: str, value: str) -> Request:
    if re.search(rf"\b{name}=", asked.source):
        changed = re.sub(rf"\b{name}=(\([^()]*\)|[\w.\"'-]+)", f"{name}={value}", asked.source)
        return replace(asked, source=changed)
    if asked.source:
        return replace(asked, source=asked.source.replace("Recipe(\n", f"Recipe(\n    {name}={value},\n", 1))
    value = value.strip("\"'")
    others = [other for other, given in (asked.options or {}).items() if given == value]  # what it was given as
    return asked.without(*others).with_options(**{name: value})


def _word(asked: Request, error: UserError, word: str, wrong: str | None) -> Request:
    """``word`` in place of the wrong one: in the file the last in the message's quotes, else an option it names."""
    told = [wrong] if wrong else re.findall(r"'([^'\n]+)'", f"{error.found}\n{error.asked}")[::-1]
    for each in told:
        quoted = [f'"{each}"', f"'{each}'"]
        for old in (old for old in (*quoted, each) if old in asked.source):
            new = word if word == "None" and old in quoted else old.replace(each, word)
            return replace(asked, source=asked.source.replace(old, new))
    options = asked.options or {}
    for name, value in options.items():
        if f"no option --{name};" in error.found:
            return asked.without(name).with_options(**{word.removeprefix("--"): value})
    named = [name for name in options if re.search(rf"--{name}\b", error.asked)]
    holding = [name for name, value in options.items() if str(value) in (*told, *error.asked.split())]
    for name in (*named, *holding):
        old = next((each for each in told if each in str(options[name])), str(options[name]))
        return asked.with_options(**{name: str(options[name]).replace(old, word)})
    for name, value in options.items():  # a part of an option's value, as in --compute remat=most
        if old := next((each for each in told if each in str(value)), ""):
            return asked.with_options(**{name: str(value).replace(old, word)})
    return asked


def _with_line(source: str, pattern: str, layout: str) -> str:
    own = re.compile(rf'"{re.escape(pattern)}": (\{{[^{{}}]*\}}|"[^"]*")')
    if own.search(source):
        return own.sub(lambda _: f'"{pattern}": {layout}', source, count=1)
    return re.sub(r"parameters=\{", lambda found: f'{found[0]}\n        "{pattern}": {layout},', source, count=1)


def _without_line(source: str, pattern: str, instead: str) -> str:
    return re.sub(rf' *r?"{re.escape(pattern)}": \{{[^{{}}]*\}},?[^\n]*\n', lambda _: instead, source, count=1)
