"""What a person named is shown as they wrote it: no path, option or message is taken for rich's markup."""

from __future__ import annotations

import ast
import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from shardwright.report.bars import byte_bar, step_bar
from shardwright.report.lines import say, waiting
from shardwright.report.terminal import closing_table
from tests.support.paths import ROOT

NAMES = ["exp[lr=1e-3]", "run[/y]", "[bold]", "a\\[b]", ":smile:", "[link=x]", "[/]", "'x' 1 True"]
SOURCES = sorted([*(ROOT / "trainer").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")])


def terminal(*, colours: bool = False) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(file=file, width=60, force_terminal=colours, color_system="truecolor" if colours else None), file


@pytest.mark.parametrize("name", NAMES)
def test_lines_bars_and_tables_show_it_as_it_is(name: str) -> None:
    console, file = terminal()
    say(console, f"output:  {name}")
    console.print(closing_table((1.0, None, 2.0), [], 3, name))
    assert file.getvalue().startswith(f"output:  {name}\n")
    assert name in file.getvalue().splitlines()[-1]
    console, file = terminal(colours=True)
    with waiting(console, f"writing {name} …"), byte_bar(console, f"checking {name}", 10) as advance:
        advance(10)
    assert f"writing {name} …" in file.getvalue()
    assert f"checking {name}" in file.getvalue()


def test_a_bar_of_steps_tells_the_time_gone_from_the_time_left() -> None:
    file = io.StringIO()
    bar = step_bar(Console(file=file, width=100, force_terminal=True, color_system=None))
    with bar:
        bar.add_task("train", total=10, completed=5, numbers="")
    assert re.search(r" 0:00:0\d gone, -:--:-- left", file.getvalue())


def test_a_line_keeps_its_length_and_has_no_colours() -> None:
    console, file = terminal(colours=True)
    say(console, "1 'a' " * 40)
    assert file.getvalue() == "1 'a' " * 40 + "\n"


def texts_given_to_rich(path: Path) -> list[str]:
    """Each call of a console's ``print`` or ``status`` that gets a text as such, and so as markup."""
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call) and node.args)
    return [
        f"{path.name}:{call.lineno}"
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("print", "status", "log", "rule")
        and ast.unparse(call.func.value).endswith(("console", "Console", ")"))
        and not isinstance(call.args[0], ast.Name | ast.Call)
    ]


def test_no_text_goes_to_a_console_but_by_say_and_waiting(tmp_path: Path) -> None:
    assert [found for path in SOURCES for found in texts_given_to_rich(path)] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text('console.print(f"to {x}")\nself.console.status("a" + b)\nsay(console, "fine")\n')
    assert texts_given_to_rich(wrong) == ["wrong.py:1", "wrong.py:2"]
