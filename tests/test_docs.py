"""The pages' links, paths, options and test commands name what is there, and figures of plans are what they print.

Every page is a screen or a few, opens with what to do, and stands in the index; what is made from the code is current.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import transformers

from shardwright.arguments.training import TrainingArguments
from shardwright.layout.copies import fitted
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import make_plan
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config
from shardwright.objectives import OBJECTIVES
from shardwright.report.units import size
from tests.support.paths import ROOT

PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        *sorted((ROOT / "docs").rglob("*.md")),
    ]
}
SOURCES = [path for folder in ("trainer", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
DOCS = {name: page for name, page in PAGES.items() if name.startswith("docs/")}
LINES, WIDTH = 200, 120
# messages of other programs, on the page of messages
THEIRS = {"RESOURCE_EXHAUSTED", "Ran out of memory in memory space hbm"}
# options of other programs in our commands, and one that is misspelt on purpose
FOREIGN = {
    "enable_lora",
    "learning_rat",
    "lora_modules",
    "no_deps",
    "nproc_per_node",
    "python",
    "restart_on_exit_codes",
    "tag",
    "target",
    "worker",
    "xla_backend_optimization_level",
    "xla_cpu_use_fusion_emitters",
    "xla_tpu_scoped_vmem_limit_kib",
}
# the published model that each recipe's docstring names → its config
NAMED = {
    "DeepSeek-V3": "deepseek_v3",
    "GPT-OSS-120B": "gpt_oss_120b",
    "Gemma-3-27B": "gemma3_27b",
    "Kimi-K2": "kimi_k2",
    "Llama-3-70B": "llama3_70b",
    "Llama-4-Scout": "llama4_scout",
    "Mixtral-8x7B": "mixtral_8x7b",
    "Qwen3-235B-A22B": "qwen3_235b_a22b",
    "Qwen3-Next-80B-A3B": "qwen3_next_80b_a3b",
}


def anchors(page: str) -> set[str]:
    """GitHub's names of the page's headings."""
    titles = re.findall(r"^#+ (.*)$", page, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_a_file_and_a_heading(name: str) -> None:
    for path, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#?([^)\s]*)\)", PAGES[name]):
        target = ((ROOT / name).parent / path).resolve() if path else ROOT / name
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text(encoding="utf-8")), (path, anchor)


@pytest.mark.parametrize("name", PAGES)
def test_paths_of_this_repository_are_there(name: str) -> None:
    paths = re.findall(r"(?<![\w/])(?:trainer|models|recipes|scripts|tests)/[\w/.-]+\.\w+", PAGES[name])
    assert [path for path in paths if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("name", PAGES)
def test_test_commands_select_tests(name: str) -> None:
    for path, word in re.findall(r"pytest (tests/[\w/]+(?:\.py)?) -k (\w+)", PAGES[name]):
        assert re.search(rf"def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8")), (path, word)


def options_in(text: str, mark: str) -> set[str]:
    """The options that stand behind ``mark`` in a text, with ``_`` for ``-``: a command takes either."""
    return {found.replace("-", "_") for found in re.findall(mark + r"--([a-z]\w*(?:-\w+)*)", text)}


def test_options_are_those_of_a_command() -> None:
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    known = {name for entry in OBJECTIVES.values() for name in entry.options} | options_in(code, '"')
    known |= set(re.findall(r"^    (\w+): .*= (?:option|field|_adamw)\(", code, re.MULTILINE))
    for name, page in PAGES.items():
        assert options_in(page, r"(?<![\w-])") - known - FOREIGN == set(), name


def test_as_many_options_are_transformers_as_the_page_says() -> None:
    theirs, ours = (
        {each.name for each in fields(kind)} for kind in (transformers.TrainingArguments, TrainingArguments)
    )
    page = " ".join(PAGES["docs/options.md"].split())
    assert f"Of the {len(theirs)} arguments of transformers" in page
    assert f"{len(theirs & ours)} are options here" in page


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_recipes_memory_is_what_its_plan_prints(path: Path) -> None:
    recipe, text = load_recipe(path.stem), path.read_text(encoding="utf-8")

    def held(model: str | None, devices: int) -> str:
        real = facts_of(load_config(model, recipe)).model
        plan = make_plan(fitted(recipe, real, devices)[0], real, devices)
        return size(sum(plan.totals.values()), decimals=2)

    (own,) = re.findall(r"memory: +([\d.]+ MiB) a device for weights, gradients and AdamW state", text)
    assert own == held(None, 8)
    for model, devices, stated in re.findall(r"^ +([\w-]+) on (\d+) devices: ([\d.]+ GiB)", text, re.MULTILINE):
        assert stated == held(str(ROOT / f"docs/configs/{NAMED[model]}.json"), int(devices)), model


@pytest.mark.parametrize("name", DOCS)
def test_a_page_opens_with_what_to_do_and_is_short(name: str) -> None:
    title, _, rest = DOCS[name].partition("\n\n")
    assert re.fullmatch("# .+", title)
    assert rest.startswith("```"), "a command or code comes first"
    assert len(DOCS[name].splitlines()) <= LINES


def prose(page: str) -> list[str]:
    """A page's lines without code, tables, headings, and code or links that can't be broken."""
    lines = re.sub(r"^ *```.*?^ *```$", "", page, flags=re.MULTILINE | re.DOTALL).splitlines()
    whole = re.compile(r"^[ \-*\d.]*(\[[^\]]*\]\([^)]*\)|`[^`]*`)[.,;:)]*$|^!\[")
    return [line for line in lines if not line.startswith(("|", "#", "<!--")) and not whole.match(line)]


@pytest.mark.parametrize("name", ["README.md", *DOCS])
def test_a_page_is_wrapped(name: str) -> None:
    assert [line for line in prose(PAGES[name]) if len(line) > WIDTH] == []


@pytest.mark.parametrize("name", [name for name in DOCS if "/records/" in name])
def test_a_record_is_its_command_a_date_the_code_and_tables(name: str) -> None:
    assert [line for line in prose(PAGES[name]) if line.strip()] == []
    dated = re.findall(r"^\| date(?:, code)? \| (20\d\d-\d\d-\d\d.*) \|$", PAGES[name], re.MULTILINE)
    assert dated
    if "suite" not in name:  # the tests' time, of every commit of those days
        assert [row for row in dated if not re.search(r"\b(?=[0-9a-f]*\d)[0-9a-f]{7}\b", row)] == []


def test_the_index_leads_to_every_page_once() -> None:
    found = re.findall(r"\]\(([^)#:]*\.md)\)", DOCS["docs/README.md"])
    assert sorted(found) == sorted(name.removeprefix("docs/") for name in DOCS if name != "docs/README.md")


def test_the_readme_is_a_screen_with_the_commands_that_ci_runs() -> None:
    lines = PAGES["README.md"].splitlines()
    assert len(lines) <= 50
    assert {
        "pip install -e . && python scripts/train.py --recipe mixtral_ep",
        "pip install -e '.[test]' && pytest -n 2",
    } < {*lines}
    assert "](docs/models.md)" in "\n".join(lines[:25])


def test_the_reference_is_what_the_code_says() -> None:
    line = [sys.executable, "scripts/measure/reference_pages.py", "--check"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300, cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "all as the code says\n"), done.stdout + done.stderr


def test_messages_on_the_page_of_messages_are_in_the_code() -> None:
    texts = " ".join(
        " ".join(part.value for part in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if is_text(part))
        for path in SOURCES
        if "tests" not in path.parts
    )
    for page in ("docs/troubleshooting.md", "docs/recompiles.md"):
        for cell in re.findall(r"^\| ([^|]*`[^|]*) \|", DOCS[page], re.MULTILINE):
            for message in set(re.findall(r"`([^`]+)`", cell)) - THEIRS:
                parts = [part.strip(" .:;") for part in re.split(r"…|\d+|--\w+", message)]
                assert max(parts, key=len) in texts, message


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
