"""docs/models.md says what the configs, the plan and the records say now."""

from __future__ import annotations

from shardwright.scripts.measure import models_page
from tests.support.paths import ROOT

PAGE = (ROOT / "docs/models.md").read_text(encoding="utf-8")
SMALL = {"Qwen/Qwen3-0.6B", "ibm-granite/granite-3.1-1b-a400m-instruct", "moonshotai/Kimi-K2-Instruct"}


def test_rows_of_a_dense_model_of_experts_and_of_one_that_is_refused_are_those_of_the_page() -> None:
    configs = [row for row in models_page.published() if row["name"] in SMALL]
    assert len(configs) == len(SMALL)
    rows, refused = models_page.read(configs)
    lines = models_page.page(rows, refused).splitlines()
    ours = [line for line in lines if line.startswith("| ") and any(name in line for name in SMALL)]
    assert len(ours) == 5  # two by the plan, two by family, one refused
    assert set(ours) <= set(PAGE.splitlines())


def test_rows_of_the_compiler_and_what_is_refused_are_the_records() -> None:
    assert set(models_page.compiled()) <= set(PAGE.splitlines())
    assert set(models_page.refusals({})) <= set(PAGE.splitlines())
    low, high = models_page.mfu_range(experts=True)
    assert f"{low:.0f} to {high:.0f} %" in " ".join(PAGE.split())


def test_every_published_model_stands_on_the_page_or_its_type_is_refused_there() -> None:
    for row in models_page.published():
        assert f"`{row['name']}`" in PAGE or f" ({row['config']['model_type']}) |" in PAGE, row["name"]
