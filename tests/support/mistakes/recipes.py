"""Mistakes of a first recipe."""

from __future__ import annotations

from pathlib import Path

from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError
from shardwright.layout.auto import AUTO, auto_recipe
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.model.lora_options import plan_of
from shardwright.model.meta_model import load_config
from tests.support.mends import Request
from tests.support.paths import ROOT

RUN = TrainingArguments()
GOOD = (ROOT / "recipes/mixtral_ep.py").read_text(encoding="utf-8")
EXPERTS = '        "model.layers.*.mlp.experts.*_proj": {"expert": Shard(0), "fsdp": Shard(2)},\n'
NORM = '"model.norm.weight": {}'
QKV = '"model.layers.*.self_attn.[qkv]_proj.weight": {"fsdp"'
HEAD = GOOD[GOOD.index('"lm_head.weight"') : GOOD.index('"vocab_size"')]
LINES = GOOD[GOOD.index("    parameters={") : GOOD.index("    optional={")]

# mistake → (what stands in a good recipe, what was written, words of the message, the devices)
RECIPES: dict[str, tuple[str, str, str, int]] = {
    "an axis misspelt": ('o_proj.weight": {"fsdp"', 'o_proj.weight": {"fdsp"', "the mesh has fsdp, expert", 8),
    "an axis that is not there": ('o_proj.weight": {"fsdp"', 'o_proj.weight": {"tp"', "the mesh has fsdp, expert", 8),
    "sizes that are not the devices": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=2, expert=2)", "multiply to 4", 8),
    "an axis that does not divide the devices": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=3)", "to 3", 8),
    "two axes that take what is left": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=-1)", "more than one", 8),
    "a size in quotes": ("Mesh(fsdp=-1, expert=4)", 'Mesh(fsdp=-1, expert="4")', "factor of '4'", 8),
    "experts on more devices than there are": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=1, expert=16)", "by 16", 16),
    "devices that divide nothing": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=4)", "multiply to 4", 3),
    "six devices": ("Mesh(fsdp=-1, expert=4)", "Mesh(fsdp=-1, expert=2)", "is not divisible by 6", 6),
    "no line for the experts": (EXPERTS, "", "no line matches", 8),
    "no line at all": (LINES, "    parameters={},\n", "no line matches", 8),
    "a pattern misspelt": ("[qkv]_proj.weight", "[qkv]_prj.weight", "no line matches", 8),
    "a pattern for all, and one for each": (NORM, '"model.*.weight": {}', "matches model.embed_tokens.weight and", 8),
    "a pattern within another": (NORM, NORM + ', "model.layers.0.mlp.gate.weight": {}', "two layouts", 8),
    "a pattern that matches nothing": (NORM, NORM + ',\n        "model.norm.bias": {}', "no parameter matches", 8),
    "a regular expression": (QKV, 'r"model\\.layers\\.\\d+\\.self_attn\\.(q|k|v)_proj\\.weight": {"fsdp"', "12", 8),
    "a * across dots": ('"model.layers.*.self_attn.o_proj.weight"', '"*.o_proj.weight"', "a * that crosses dots", 8),
    "a vocabulary that does not divide": ('"vocab_size": 2048', '"vocab_size": 2046', "is not divisible by 8", 8),
    "experts that do not divide": ('"num_local_experts": 8', '"num_local_experts": 6', "is not divisible by 4", 8),
    "a dimension out of range": (NORM, '"model.norm.weight": {"fsdp": Shard(1)}', "out of range", 8),
    "tied names with two layouts": (
        HEAD,
        HEAD.replace(', "expert": Shard(0)}', "}", 1) + '"tie_word_embeddings": True, ',
        "ties the two",
        8,
    ),
    "no batch axes": ('    batch=("fsdp", "expert"),\n', "", "missing 1 required positional argument: 'batch'", 8),
    "batch axes without a comma": ('batch=("fsdp", "expert")', 'batch=("fsdp")', "batch is a tuple", 8),
    "a batch axis misspelt": ('batch=("fsdp", "expert")', 'batch=("fsdp", "exprt")', "the mesh has", 8),
    "a batch axis twice": ('batch=("fsdp", "expert")', 'batch=("fsdp", "fsdp")', "named twice", 8),
    "experts by another's word": ('experts="dropless"', 'experts="ep"', "'ep', which is no value of experts", 8),
    "a word misspelt": ('remat="full"', 'remat="ful"', "no value of remat", 8),
    "a truth in quotes": ("scan=True", 'scan="yes"', "a str", 8),
    "a capacity that is none": ('experts="dropless"', 'experts="capacity", capacity_factor=0', "positive", 8),
    "a policy misspelt": ("router_loss=True", "routerloss=True", "unexpected keyword argument 'routerloss'", 8),
    "no variable recipe": ("recipe = Recipe(", "mine = Recipe(", "no variable named recipe", 8),
    "a word that is not imported": ("Compute, Mesh, Recipe, Shard", "Compute, Mesh, Recipe", "'Shard' is not", 8),
    "a word misspelt in the import": ("import Compute, Mesh, Recipe, Shard", "import Sharding", "'Sharding'", 8),
    "the package's old name": ("from shardwright import", "from trainer import", "trainer was its name", 8),
    "a layout in words": (NORM, '"model.norm.weight": "replicate"', "a str", 8),
    "a placement that is a number": (NORM, '"model.norm.weight": {"fsdp": 0}', "an int", 8),
    "a line twice": (NORM, NORM + ",\n        " + NORM, "twice in one table", 8),
    "an activation misspelt": ('activations={"model.layers.*"', 'activations={"model.layer.*"', "no module", 8),
    "a default model without its type": ('        "model_type": "mixtral",\n', "", "model_type", 8),
}
# of these the message says what to do in words alone
IN_WORDS = {"a line twice", "a default model without its type"}


def plan_of_file(asked: Request, folder: Path) -> UserError | None:
    """The error of the recipe's plan, if it has none."""
    path = folder / "mine.py"
    path.write_text(asked.source)
    try:
        if (name := (asked.options or {}).get("recipe")) is not None:
            facts = facts_of(load_config(None, load_recipe(str(path))))
            assert name == AUTO
            made = auto_recipe(facts.model, facts.experts, None, asked.devices).recipe
            plan_of(made, facts, None, asked.devices, RUN)
            return None
        recipe = load_recipe(str(path))
        mesh = (asked.options or {}).get("mesh")
        recipe = recipe.with_mesh(str(mesh)) if mesh else recipe
        plan_of(recipe, facts_of(load_config(None, recipe)), None, asked.devices, RUN)
    except UserError as error:
        return error
    return None
