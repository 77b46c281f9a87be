"""Names that people gave are shown as they wrote them, none is taken for rich's markup or a terminal's orders."""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import time
import unicodedata
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console
from rich.table import Table

from shardwright.report import lines
from shardwright.report.audit_report import AuditView, Finding, audit_page, print_audit
from shardwright.report.bars import byte_bar, step_bar
from shardwright.report.escapes import escaped
from shardwright.report.lines import Terminal, say, waiting
from shardwright.report.terminal import ProgressCallback, closing_table
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
    console.print(closing_table((1.0, None, 2.0), [], "train step 1", name))
    assert file.getvalue().startswith(f"output:  {name}\n")
    assert name in file.getvalue().splitlines()[-1]
    console, file = terminal(colours=True)
    with waiting(console, f"writing {name} …"), byte_bar(console, f"checking {name}", 10) as advance:
        advance(10)
    assert f"writing {name} …" in file.getvalue()
    assert f"checking {name}" in file.getvalue()


@pytest.mark.parametrize("width", [100, 40])
def test_a_bar_of_steps_names_the_time_elapsed_and_the_time_left_at_any_width(width: int) -> None:
    file = io.StringIO()
    bar = step_bar(Console(file=file, width=width, force_terminal=True, color_system=None))
    with bar:
        bar.add_task("train", total=10, completed=5, numbers="loss 1.234  5,678 tokens/s", left=3725.0)
    assert re.search(r"0:0\d elapsed, 1:02:05 left", file.getvalue())


def test_the_time_left_is_that_of_the_steps_to_come_and_the_first_with_its_compile_is_left_out() -> None:
    clock = iter([0.0, 100.0, 110.0, 110.0, 110.0])  # begun; the first step has ended; ten steps later
    file = io.StringIO()
    progress = ProgressCallback(Terminal(file=file), lambda: next(clock))
    state = SimpleNamespace(global_step=0, max_steps=31)
    progress.on_train_begin(None, state, None)
    state.global_step = 1
    progress.on_step_end(None, state, None)
    state.global_step = 11
    progress.on_step_end(None, state, None)
    progress.on_log(None, state, None, logs={"loss": 1.0, "tokens_per_second": 9.0, "save_bytes": 46684810})
    assert "44.5 MiB" in file.getvalue()
    assert file.getvalue().endswith("1:50 elapsed, 0:20 left\n")


def test_a_pipe_is_as_wide_as_its_lines(monkeypatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file, folder = io.StringIO(), "output/" + "a" * 200
    Terminal(file=file).print(closing_table((1.0, 0.5, 2.0), [], "train step 1", folder))
    assert folder in file.getvalue()


def test_a_narrow_terminal_folds_a_table_and_cuts_nothing_and_reads_no_markup() -> None:
    told, words = Terminal(file=io.StringIO(), width=30), ["[/b]device_train_batch_size", "runs/[red]s_that_is_so_long"]
    table = Table("option", "value", box=None)
    table.add_row(*words)
    told.print(table)
    cells = [line.split() for line in told.file.getvalue().splitlines()[1:]]
    assert ["".join(parts) for parts in zip(*cells, strict=True)] == words


def test_a_pipe_is_told_each_minute_what_is_waited_for(monkeypatch) -> None:
    monkeypatch.setattr(lines, "_MINUTE", 0.02)
    told = Terminal(file=io.StringIO())
    with waiting(told, "compiling …"):
        while told.file.getvalue().count("\n") < 2:
            time.sleep(0.01)
    assert told.file.getvalue().startswith("still: compiling … (0:00)\n")


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
        and not isinstance(call.args[0], ast.Name | ast.Call | ast.Starred)
    ]


def test_no_text_goes_to_a_console_but_by_say_and_waiting(tmp_path: Path) -> None:
    assert [found for path in SOURCES for found in texts_given_to_rich(path)] == []
    wrong = tmp_path / "wrong.py"
    wrong.write_text('console.print(f"to {x}")\nself.console.status("a" + b)\nsay(console, "fine")\n')
    assert texts_given_to_rich(wrong) == ["wrong.py:1", "wrong.py:2"]


# ---- orders to the terminal ----

# a title, a cleared screen, the clipboard, the same in one character, a line drawn over, a turned one, half a pair
ORDERS = "a \x1b]0;owned\x07 \x1b[2J \x1b]52;c;aGk=\x1b\\\\ \x9b2J \b\b\b \u202etxt.exe \u2028 \x85 \ud800 z"
OBEYED = ("Cc", "Zl", "Zp", "Cs")
TURNING = ("LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI")
# every way in which a script prints
PRINTS = """
import json, sys, time, warnings, logging
from rich.text import Text
from shardwright.hosts.output_streams import exit_code
from shardwright.report.bars import tracked
from shardwright.report.lines import Terminal, say

def main():
    orders, console = json.loads(sys.argv[1]), Terminal(force_terminal=sys.argv[2] == "colours")
    say(console, orders)
    console.print(Text(orders, style="bold"))
    print(orders)
    print(orders, file=sys.stderr)
    warnings.warn(orders)
    logging.getLogger("library").warning(orders)
    for _ in tracked(console, "rows", range(1), 1):
        print(orders)
    raise ValueError(orders)

sys.exit(exit_code(main))
"""


def obeys(character: str) -> bool:
    turned = unicodedata.bidirectional(character) in TURNING
    return character not in "\t\n" and (turned or unicodedata.category(character) in OBEYED)


def test_of_all_of_unicode_no_character_that_a_terminal_obeys_is_left_and_the_others_stay() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert not any(map(obeys, escaped(every)))
    for character in filter(obeys, every):
        assert json.loads(f'"{escaped(character)}"') == character
    for text in (*NAMES, "tab\tline\nend", "\U0001f469\u200d\U0001f4bb \u05d0\u0628 naïve 中文"):
        assert escaped(text) == text


@pytest.mark.parametrize("kind", ["plain", "colours"])
def test_whatever_a_script_prints_and_however_it_is_escaped(kind: str) -> None:
    words = [sys.executable, "-c", PRINTS, json.dumps(ORDERS), kind]
    done = subprocess.run(words, capture_output=True, encoding="utf-8", cwd=ROOT, check=False)
    assert done.returncode == 70
    out, own = re.subn(r"\x1b\[(\?25[lh]|1A|2K|[\d;]*m)|\r", "", done.stdout)  # rich's styles, and its bar's cursor
    assert bool(own) == (kind == "colours")
    assert not any(map(obeys, out + done.stderr))
    assert out.count("\\u001b[2J") >= 3
    assert done.stderr.count("\\u001b]52;c;") >= 4


def test_an_audit_shows_them_escaped_on_the_terminal_and_in_its_page() -> None:
    file = io.StringIO()
    finding = Finding(ORDERS, ORDERS, True, 1, [(ORDERS, ORDERS)])
    pieces = [(ORDERS, True), ("<script>", False)]
    view = AuditView(ORDERS, [(ORDERS, ORDERS)], ["a", "b"], [[ORDERS, "b"]], [("1", 1)], [finding], [(ORDERS, pieces)])
    print_audit(Terminal(file=file, width=200), view)
    for shown in (file.getvalue(), audit_page(view)):
        assert not any(map(obeys, shown))
        assert "\\u001b[2J" in shown
    assert "<script>" not in audit_page(view).partition("</head>")[2].replace("<script>\n", "")


def test_every_console_that_speaks_is_one_that_escapes() -> None:
    places = [path for path in SOURCES if "measure" not in path.parts and path.name != "lines.py"]
    calls = [node for path in places for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
    made = {ast.unparse(call) for call in calls if ast.unparse(call.func).endswith("Console")}
    assert made == {"Console(quiet=True)"}
