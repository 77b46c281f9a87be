"""Errors mend: what a message says to write instead is applied, and leads on.

Each row of the tables in `tests/support/mistakes` is one mistake. Every line, option and word of its message's
`instead` is applied to what was asked, each by itself, and must get further: to the end, or to another error. The table
of what was tried, and how far it led, is printed: `pytest -rP tests/test_mends.py | grep MEND`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.arguments.command_line import parse
from shardwright.arguments.training import TrainingArguments
from shardwright.compile.compile_arguments import CompileArguments
from shardwright.errors import UserError
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.inputs import RunInputs
from shardwright.run import prepare
from tests.support.mends import Request, mended
from tests.support.messages import Offers, Site
from tests.support.mistakes import calls, commands, data, objects, own_loop, recipes, rooms, weights
from tests.support.mistakes.untried import UNTRIED
from tests.support.paths import ROOT
from tests.support.tried import Tried

TRIED = Tried()
ROOMS = ("trainer", "models", "scripts")  # scripts/measure is the house's own
APPLIED = re.compile(r"(?<![\w-])--[a-z]\w+|\b\w+=(?!=)|\w\(|\bpip install|\bpython |\": \{|did you mean|^one of|\bhf ")
CALLS = {**objects.MISTAKES, **calls.MISTAKES, **data.MISTAKES, **weights.MISTAKES, **own_loop.MISTAKES}
OPTIONS = (TrainingArguments, CompileArguments, EvaluationArguments)
OTHERS = (
    "run",
    "env",
    "output",
    "mount",
    "image",
    "checkpoint",
    "merge",
    "format",
    "key_format",
    "max_shard_size",
    "devices",
    "help",
    "dcn",
)  # scripts' own


def check(
    mistake: str, error: UserError | None, words: str, mends: Mapping[str, Callable[[], UserError | None]], some: bool
) -> None:
    """Each of the ``mends``, of which there are ``some``, leads on from the ``error`` of a mistake."""
    assert error is not None
    assert words in str(error)
    assert bool(mends) is some, error
    TRIED.note(mistake, error, some)
    for mend, tried in mends.items():
        later = tried()
        print(f"MEND {mistake}\t{mend}\t{'on' if later is None else later}")
        assert later is None or (later.asked, later.found) != (error.asked, error.found), (mend, str(error))


def applied(
    asked: Request,
    error: UserError | None,
    refusal: Callable[[Request], UserError | None],
    said: Mapping[str, Mapping[str, object]] | None = None,
    devices: bool = False,
) -> dict[str, Callable[[], UserError | None]]:
    """The mends of an ``error``, each to be tried.

    ``said``: words of the message → the options that one gives who follows them. ``devices``: those that take other
    devices, too.
    """
    if error is None:
        return {}
    assert [words for words in said or () if words not in error.instead] == [], error
    found = {words: asked.with_options(**options) for words, options in (said or {}).items()} or mended(asked, error)
    found = {mend: each for mend, each in found.items() if devices or each.devices == asked.devices}
    return {mend: partial(refusal, each) for mend, each in found.items()}


@pytest.mark.parametrize("mistake", recipes.RECIPES)
def test_what_a_recipes_message_offers_leads_to_a_plan_or_to_another_message(mistake: str, tmp_path: Path) -> None:
    good, written, words, devices = recipes.RECIPES[mistake]
    assert good in recipes.GOOD
    asked = Request(recipes.GOOD.replace(good, written, 1), devices=devices)
    refusal = partial(recipes.plan_of_file, folder=tmp_path)
    with TRIED.watching():
        error = refusal(asked)
    check(mistake, error, words, applied(asked, error, refusal, devices=True), mistake not in recipes.IN_WORDS)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("world")
    for name, content in commands.FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(content)
    rooms.write(root)
    return root


@pytest.fixture
def inside(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of the ``world`` is the working directory, with a cache of its own."""
    monkeypatch.chdir(world)
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(world / "cache"))


def refusal_of(asked: Request, capsys: pytest.CaptureFixture[str]) -> UserError | None:
    """The error with which a run of these options ends before it opens its data, if it does."""
    words = []
    for name, value in (asked.options or {}).items():
        flag = [f"--{name}"] if name else []
        words += [] if value is None else flag if value is True else [*flag, str(value)]
    try:
        prepare(*parse([TrainingArguments], words, None), RunInputs(), [], Console(quiet=True))
    except UserError as error:
        return error
    except SystemExit:
        found = re.sub(r";? --help lists .*", "", capsys.readouterr().err.strip())
        return UserError(asked=found, found=found, why="", instead=found.partition("; ")[2].removeprefix("instead: "))
    return None


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("mistake", commands.COMMANDS)
def test_what_a_commands_message_offers_leads_to_a_run_or_to_another_message(
    mistake: str, capsys: pytest.CaptureFixture[str]
) -> None:
    options, words, *said = commands.COMMANDS[mistake]
    asked = Request(options={**commands.COMMAND, **options})
    refusal = partial(refusal_of, capsys=capsys)
    with TRIED.watching():
        error = refusal(asked)
    check(mistake, error, words, applied(asked, error, refusal, *said), mistake not in commands.IN_WORDS)


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("mistake", rooms.MISTAKES)
def test_what_data_and_the_other_commands_offer_leads_on(mistake: str) -> None:
    room, options, words, *said = rooms.MISTAKES[mistake]
    given = {**rooms.ROOMS[room][1], **options}
    asked = Request(options={name: value for name, value in given.items() if room == "export" or value is not None})
    refusal = partial(rooms.refusal_of, room)
    with TRIED.watching():
        error = refusal(asked)
    check(mistake, error, words, applied(asked, error, refusal, *said), mistake not in rooms.IN_WORDS)


def called(does: Callable[[], object]) -> UserError | None:
    try:
        does()
    except UserError as error:
        return error
    return None


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("mistake", CALLS)
def test_what_a_call_is_offered_leads_on(mistake: str) -> None:
    does, words, mends = CALLS[mistake]
    with TRIED.watching():
        error = called(does)
    assert error is not None
    assert [mend for mend in mends if mend not in error.instead] == [], error
    check(mistake, error, words, {mend: partial(called, tried) for mend, tried in mends.items()}, some=True)


PYTHON: dict[str, tuple[dict[str, object], str]] = {
    "a number in quotes": ({"max_steps": "10"}, "--max_steps 10 ("),
    "a rate in quotes": ({"learning_rate": "5e-5"}, "--learning_rate 5e-05 ("),
    "a truth in quotes": ({"streaming": "yes"}, "--streaming true"),
    "a number that is none": ({"max_steps": "ten"}, "--max_steps -1, the default"),
    "a folder as the first by place": ({"recipe": "results"}, 'output_dir="results"'),
}


@pytest.mark.usefixtures("inside")
@pytest.mark.parametrize("mistake", PYTHON)
def test_what_is_offered_in_python_is_what_was_meant(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    options, words = PYTHON[mistake]
    given = {"model": "llama.json", "dataset": "text", **options}
    with TRIED.watching(), pytest.raises(UserError) as refused:
        prepare(TrainingArguments(**given), RunInputs(), [], Console(quiet=True))
    assert words in refused.value.instead
    TRIED.note(mistake, refused.value, mends=True)
    written = {name: value if name == "recipe" else repr(value) for name, value in options.items()}
    mends = mended(Request(options={**given, **written}), refused.value)
    assert refusal_of(next(iter(mends.values())), capsys) is None


@pytest.fixture(scope="module")
def offers() -> Offers:
    return Offers(
        [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py")) if path.parent.name != "measure"]
    )


def test_every_option_that_a_message_offers_is_one_of_a_command(offers: Offers) -> None:
    known = {f"--{each.name}" for kind in OPTIONS for each in fields(kind)} | {f"--{each}" for each in OTHERS}
    known |= {f"--no_{each.name}" for kind in OPTIONS for each in fields(kind) if each.default is True}
    assert {"check", "at_least", "_beside", "unproved", "refused"} <= offers.helpers.keys()
    found: dict[str, Site] = {}
    for where, text in offers.texts():
        assert "pip install -e" not in text, where  # of a checkout alone, and in its folder
        if "pip install" not in text:  # its options are its own
            for option in re.findall(r"(?<![\w-])--[a-z]\w+", text):
                found.setdefault(option, where)
    assert len(found) > 60
    assert {option: where for option, where in found.items() if option not in known} == {}


def test_every_mend_that_can_be_applied_is_tried(offers: Offers) -> None:
    """A command, an option, a call or a word of a list that a message offers is in one of the tables, or left out."""
    sites = {where for where, text in offers.texts() if APPLIED.search(text)}
    untried = {where for where in sites if not TRIED.reaches(where)}
    names = {f"{Path(each.path).relative_to(ROOT)} {each.function}".rstrip() for each in untried}
    print(f"MENDS {len(sites)} places, {len(sites) - len(untried)} tried; not", *sorted(names), sep="\n")
    assert names >= UNTRIED.keys()
    if {*recipes.RECIPES, *commands.COMMANDS, *rooms.MISTAKES, *CALLS, *PYTHON} <= TRIED.mistakes:  # all ran here
        assert names == UNTRIED.keys()
