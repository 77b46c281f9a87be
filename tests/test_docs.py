"""The pages' links, paths, options and test commands name what is there, and figures of plans are what they print."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest
import transformers

from shardwright.arguments.training import TrainingArguments
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
# options of other programs in our commands, and one that is misspelt on purpose
FOREIGN = {
    "enable_lora",
    "learning_rat",
    "lora_modules",
    "no_deps",
    "python",
    "restart_on_exit_codes",
    "tag",
    "target",
    "worker",
    "xla_backend_optimization_level",
    "xla_tpu_scoped_vmem_limit_kib",
}
# the published model that each recipe's docstring names → its config
NAMED = {
    "DeepSeek-V3": "deepseek_v3",
    "GPT-OSS-120B": "gpt_oss_120b",
    "Gemma-3-27B": "gemma3_27b",
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
    assert f"Of the {len(theirs)} arguments of transformers" in PAGES["docs/run.md"]
    assert f"{len(theirs & ours)} are options here" in PAGES["docs/run.md"]


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("[a-z]*.py")), ids=lambda path: path.stem)
def test_a_recipes_memory_is_what_its_plan_prints(path: Path) -> None:
    recipe, text = load_recipe(path.stem), path.read_text(encoding="utf-8")

    def held(model: str | None, devices: int) -> str:
        plan = make_plan(recipe, facts_of(load_config(model, recipe)).model, devices)
        return size(sum(plan.totals.values()), decimals=2)

    (own,) = re.findall(r"memory: +([\d.]+ MiB) a device for weights, gradients and AdamW state", text)
    assert own == held(None, 8)
    for model, devices, stated in re.findall(r"^ +([\w-]+) on (\d+) devices: ([\d.]+ GiB)", text, re.MULTILINE):
        assert stated == held(str(ROOT / f"docs/configs/{NAMED[model]}.json"), int(devices)), model
