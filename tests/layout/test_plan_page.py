"""The page of a plan, in a browser: a device's pieces are those that numpy cuts, and a token finds its experts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import ShardingPlan, make_plan
from shardwright.layout.plan_page import plan_page
from shardwright.model.facts import facts_of
from shardwright.model.meta_model import load_config
from tests.support.browser import Browser
from tests.support.paths import ROOT

TITLE = "a/folder/of/models/whose/path/is/longer/than/the/screen/of/a/phone/config.json"
# the words at the head of tables that are broken over two lines
BROKEN = """[...document.querySelectorAll('.wide tr:first-child > th')].filter(cell => {
    const range = document.createRange(), text = cell.firstChild;
    if (!text || /\\s/.test(text.data.trim())) return false;
    range.selectNodeContents(cell);
    return new Set([...range.getClientRects()].map(r => Math.round(r.top))).size > 1;
}).map(cell => cell.textContent)"""


def written(path: Path, recipe: str, config: str | None, devices: int) -> ShardingPlan:
    made = load_recipe(recipe)
    facts = facts_of(load_config(config and str(ROOT / f"docs/configs/{config}.json"), made))
    plan = make_plan(made, facts.model, devices)
    path.write_text(plan_page(plan, f"<b>{recipe}: {TITLE}", facts.experts, facts.routing))
    return plan


def pieces(plan: ShardingPlan, name: str, device: int) -> list[range]:
    """The indices of each dimension on a device, cut axis by axis in mesh order."""
    parameter = plan[name]
    where = dict(zip(plan.mesh, np.unravel_index(device, list(plan.mesh.values())), strict=True))
    found = []
    for dim, size in enumerate(parameter.shape):
        part = np.arange(size)
        for axis in parameter.axes_of(dim):
            part = np.split(part, plan.mesh[axis])[where[axis]]
        found.append(range(part[0], part[-1] + 1))
    return found


@pytest.fixture(scope="module")
def browser() -> Any:
    with Browser(width=390) as opened:
        yield opened


@pytest.mark.parametrize(
    ("recipe", "config", "devices", "device"),
    [("mixtral_ep", None, 8, 6), ("mixtral_ep_tp", None, 8, 5), ("mixtral_ep", "mixtral_8x7b", 64, 37)],
)
def test_a_device_pointed_at_holds_what_numpy_cuts(
    browser: Browser, tmp_path: Path, recipe: str, config: str | None, devices: int, device: int
) -> None:
    plan = written(tmp_path / "plan.html", recipe, config, devices)
    browser.events.clear()
    browser.open(tmp_path / "plan.html")
    cell = f"document.querySelector('.mesh [data-device=\"{device}\"]')"
    x, y = browser.evaluate(f"(r => [r.left + r.width / 2, r.top + r.height / 2])({cell}.getBoundingClientRect())")
    browser.hover(x, y)
    said = browser.evaluate(
        "[...document.querySelectorAll('.kind')].map(k => [k.querySelector('h3').textContent, "
        "k.querySelector('p').textContent, k.querySelector('.piece').textContent])"
    )
    assert said
    for pattern, shape, piece in said:
        local = re.search(r" of (\S+),", shape)[1]
        parameter = next(p for p in plan.parameters if p.pattern == pattern and "×".join(map(str, p.shape)) == local)
        want = pieces(plan, parameter.name, device)
        text = [":" if len(r) == size else f"{r.start}:{r.stop}" for r, size in zip(want, parameter.shape, strict=True)]
        whole = all(part == ":" for part in text)
        assert piece == f"device {device}: " + ("whole on each device" if whole else f"[{', '.join(text)}]")
    assert browser.evaluate("document.documentElement.scrollWidth") <= 390
    assert browser.evaluate(BROKEN) == []
    assert [e for e in browser.events if e["method"] in ("Runtime.exceptionThrown", "Log.entryAdded")] == []
    assert len([e for e in browser.events if e["method"] == "Network.requestWillBeSent"]) == 1


def test_a_token_is_drawn_to_the_devices_that_hold_its_experts(browser: Browser, tmp_path: Path) -> None:
    plan = written(tmp_path / "plan.html", "mixtral_ep", None, 8)
    browser.open(tmp_path / "plan.html")
    said = browser.evaluate("document.querySelector('#way-said').textContent")
    chosen = [int(number) for number in re.search(r"here ([\d, ]+),", said)[1].split(",")]
    boxes = browser.evaluate("[...document.querySelectorAll('#way svg text')].slice(1).map(t => t.textContent)")
    held = {
        int(box.split(":")[0]): range(int(box.split()[1].split("–")[0]), int(box.split("–")[1]) + 1) for box in boxes
    }
    experts = next(p.name for p in plan.parameters if p.name.endswith("experts.down_proj"))
    assert held == {device: pieces(plan, experts, device)[0] for device in range(4)}  # those of its group
    arrows = browser.evaluate("document.querySelectorAll('#way path').length")
    assert arrows == len({device for device, own in held.items() for expert in chosen if expert in own})
    assert "An all-to-all over expert" in said


def test_a_dense_model_has_no_way_and_names_are_escaped(tmp_path: Path) -> None:
    written(tmp_path / "plan.html", "llama_fsdp", None, 8)
    page = (tmp_path / "plan.html").read_text()
    assert "A token's way" not in page
    assert "<b>llama" not in page
    assert json.loads(re.search(r'data-plan="([^"]*)"', page)[1].replace("&#34;", '"'))["way"] is None
