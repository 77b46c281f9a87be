"""The page of a recipe's messages shows what the plan says of each mistake in the guide's recipe."""

import json
import re

import pytest

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.plan import make_plan
from shardwright.model.meta_model import load_config, meta_model
from tests.support.paths import ROOT

GUIDE, PAGE = ((ROOT / f"docs/{name}.md").read_text(encoding="utf-8") for name in ("recipes", "recipe_messages"))
CONFIG, EMPTY, TABLE = (part.partition("\n```")[0] for part in re.split(r"```(?:json|python)\n", GUIDE)[1:4])
RECIPE = EMPTY.replace("    parameters={},", TABLE)
NORM, HEAD = '"model.norm.weight": {}', '"lm_head.weight": {"fsdp": Shard(0)}'
# what is wrong → what stands in the guide's recipe, and what in its place; devices; changes of the config
MISTAKES = {
    "a misspelt line": (NORM, '"model.norn.weight": {}', 8, {}),
    "a line too many": (NORM, f'{NORM},\n        "model.norm.bias": {{}}', 8, {}),
    "two lines for one parameter": (NORM, f'{NORM},\n        "model.*.weight": {{}}', 8, {}),
    "an axis that the mesh lacks": ('o_proj.weight": {"fsdp"', 'o_proj.weight": {"fdsp"', 8, {}),
    "an axis twice": (HEAD, '"lm_head.weight": {"fsdp": Shard(0), "fsdp": Shard(1)}', 8, {}),
    "a dimension that there is not": (NORM, '"model.norm.weight": {"fsdp": Shard(1)}', 8, {}),
    "a dimension that does not divide": ("", "", 6, {}),
    "a mesh that does not fit": ("Mesh(fsdp=-1)", "Mesh(fsdp=4)", 6, {}),
    "two layouts of one tensor": (HEAD, '"lm_head.weight": {"fsdp": Shard(1)}', 8, {"tie_word_embeddings": True}),
    "a comma that is missing": ('("fsdp",)', '("fsdp")', 8, {}),
}


def plan(devices):
    recipe = load_recipe("mine.py")
    make_plan(recipe, meta_model(load_config("tiny_qwen3.json", recipe)), devices)


@pytest.mark.parametrize("wrong", MISTAKES)
def test_the_page_shows_what_is_said_of_a_recipe_with(wrong, tmp_path, monkeypatch):
    there, instead, devices, config = MISTAKES[wrong]
    assert there in RECIPE
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny_qwen3.json").write_text(json.dumps(json.loads(CONFIG) | config))
    (tmp_path / "mine.py").write_text(RECIPE.replace(there, instead) if there else RECIPE)
    with pytest.raises(UserError) as error:
        plan(devices)
    assert f"```\nerror: {error.value}\n```" in PAGE


def test_the_page_shows_no_other_message():
    assert PAGE.count("\nerror: ") == len(MISTAKES)
