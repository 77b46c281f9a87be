"""Print where a recipe puts every parameter of a model, and what a device holds; needs no device, no weights.

python scripts/plan.py --recipe mixtral_ep --model docs/configs/mixtral_8x7b.json --devices 64
python scripts/plan.py --recipe mixtral_ep --devices 64 --html plan.html     # the same as a page, to point at
python scripts/plan.py --recipe auto --model docs/configs/qwen3_30b_a3b.json --write my_recipe.py
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from dataclasses import fields
from typing import TYPE_CHECKING

# No device is needed, so transformers must not import torch_xla: that takes seconds and opens one.
os.environ["USE_TORCH_XLA"] = "0"

from shardwright.arguments.command_line import Parser
from shardwright.arguments.help_page import METAVARS, in_brief
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError, command
from shardwright.files.asked_file import check_new, check_outputs, write_asked
from shardwright.hosts.output_streams import exit_code
from shardwright.xla.light_imports import uncollected

if TYPE_CHECKING:
    from shardwright.layout.auto import AutoRecipe
    from shardwright.layout.plan import ShardingPlan
    from shardwright.layout.recipe import Recipe
    from shardwright.model.facts import ModelFacts

AUTO = "auto"
# options of a run that change what a device holds, and those of its length
_RUN: dict[str, type] = {"lora_r": int, "max_steps": int, "warmup_steps": float}
_RUN |= dict.fromkeys(("lora_target", "adapter", "base_dtype", "weight_dtype", "optimizer_dtype", "optim"), str)
_RUN |= dict.fromkeys(("rank_pattern", "exclude_modules", "layers_to_transform", "modules_to_save"), str)


def parser() -> Parser:
    found = Parser(__doc__)
    recipes = "name in recipes/, or path of a .py file; or auto: made from --model's own parallel plan and shapes"
    found.add_argument("--recipe", required=True, help=recipes)
    found.add_argument("--model", help="hub id, folder, or config.json; default: the recipe's own small model")
    found.add_argument("--devices", type=int, default=8, help="devices in the mesh (default: 8)")
    found.add_argument("--mesh", help="other ICI factors for the recipe's axes, e.g. fsdp=2,expert=4")
    found.add_argument("--json", action="store_true", help="print JSON alone")
    found.add_argument("--html", metavar="FILE", help="write the plan to this file too, as a page that loads nothing")
    found.add_argument("--write", metavar="FILE", help="write the recipe that auto makes to this new .py file")
    of_run = found.add_argument_group("options of a run that change what a device holds, as in scripts/train.py")
    texts = {each.name: each.metadata["help"] for each in fields(TrainingArguments)}
    for name, kind in _RUN.items():
        of_run.add_argument(f"--{name}", type=kind, metavar=METAVARS[kind], help=in_brief(texts[name]))
    of_run.add_argument("--train_mtp", action="store_true", help=in_brief(texts["train_mtp"]))
    found.takes_run_file()
    return found


@uncollected()
def main() -> None:
    arguments = parser().parse_args()

    import transformers

    from shardwright.layout.copies import fitted
    from shardwright.layout.plan_page import plan_page
    from shardwright.layout.plan_table import print_plan
    from shardwright.layout.plan_warnings import plan_warnings
    from shardwright.model.lora_options import lora_of, plan_of
    from shardwright.model.model_checks import check_model
    from shardwright.report.lines import Terminal, say, waiting

    transformers.logging.set_verbosity_error()  # of models that are tried small
    if arguments.write is not None:
        _check_made(arguments.write, arguments.recipe)
    written = {"--write": arguments.write, "--html": arguments.html}
    check_outputs(written, "it is written once the plan is made", vars(arguments))
    recipe, facts, made = _asked(arguments)
    options = {name: getattr(arguments, name) for name in _RUN if getattr(arguments, name) is not None}
    options["train_mtp"] = arguments.train_mtp
    # a length in epochs leaves the schedule open; with steps it is tried, for which transformers imports peft
    args = TrainingArguments(recipe=arguments.recipe, num_train_epochs=1, **options)
    with waiting(Terminal(stderr=arguments.json), "trying a small one of its kind …"):
        check_model(recipe, args, facts)  # what no run trains has no plan
    recipe, copies = fitted(recipe, facts.model, arguments.devices)
    plan = plan_of(recipe, facts, lora_of(args, facts), arguments.devices, args)
    warnings = list(filter(None, (copies, *plan_warnings(plan))))
    if args.max_steps > 0 and (notice := args.schedule(peak=1.0).notice):
        warnings.append(f"learning rate: {notice}")
    if arguments.json:
        print(json.dumps(plan.as_json() | {"warnings": warnings}, indent=2))
    else:
        print_plan(plan)
        for text in warnings:
            say(Terminal(), f"warning: {text}")
        if made is not None and made.undivided:
            say(Terminal(), "\ncut elsewhere, or left whole")
            for pattern, text in made.undivided.items():
                say(Terminal(), f"  {pattern}: {text}")
    if arguments.html is not None:
        name = f"{arguments.recipe}: {arguments.model or 'its own model'}"
        write_asked(arguments.html, "--html", plan_page(plan, name, facts.experts, facts.routing, warnings))
        say(Terminal(stderr=arguments.json), f"\npage: {arguments.html}")
    if made is not None and arguments.write is not None:
        _write(made, plan, facts.kind, arguments)


def _asked(arguments: argparse.Namespace) -> tuple[Recipe, ModelFacts, AutoRecipe | None]:
    """The recipe, what it is planned for, and how ``auto`` made it, if it did."""
    from shardwright.layout.auto import UNMADE, auto_recipe
    from shardwright.layout.load_recipe import load_recipe
    from shardwright.model.facts import facts_of
    from shardwright.model.meta_model import load_config

    if arguments.recipe == AUTO:
        facts = facts_of(load_config(arguments.model, UNMADE), arguments.train_mtp)
        made = auto_recipe(facts.model, facts.experts, arguments.mesh, arguments.devices)
        return made.recipe, facts, made
    recipe = load_recipe(arguments.recipe)
    recipe = recipe.with_mesh(arguments.mesh) if arguments.mesh else recipe
    return recipe, facts_of(load_config(arguments.model, recipe), arguments.train_mtp), None


def _check_made(path: str, recipe: str) -> None:
    """Raises UserError unless ``--write`` names a new recipe file, and the recipe is one that is made."""
    if recipe != AUTO:
        raise UserError(
            asked=f"--write {path} with --recipe {recipe}",
            found="a recipe that is a file already",
            why="what is written is the recipe made from a model",
            instead=f"--recipe {AUTO}; or a copy of that file",
        )
    check_new(path, "--write", "my_recipe.py", ending=".py")


def _write(made: AutoRecipe, plan: ShardingPlan, model_class: str, arguments: argparse.Namespace) -> None:
    """Writes the recipe to the new file ``--write``, and says how to use it."""

    from shardwright.layout.recipe_source import recipe_source
    from shardwright.optimizers import OPTIMIZERS
    from shardwright.report.lines import Terminal, say
    from shardwright.report.units import mesh_text, size

    use = f"{command('train')} --recipe {shlex.quote(arguments.write)} --model {shlex.quote(arguments.model)}"
    docstring = (
        f"{model_class}: made from its own parallel plan and shapes by {command('plan')} --recipe {AUTO}, and yours to "
        f"edit.\n\ncommand:   {use}\nhardware:  {plan.devices} devices as {mesh_text(plan.mesh)}\n"
        f"memory:    {size(sum(plan.totals.values()), decimals=2)} a device for weights, gradients and "
        f"{OPTIMIZERS[plan.optim].title} state, by {command('plan')}\n"
    )
    write_asked(arguments.write, "--write", recipe_source(made, docstring), new=True)
    say(Terminal(stderr=arguments.json), f"\nwritten to {arguments.write}; train with it:\n  {use}")


if __name__ == "__main__":
    sys.exit(exit_code(main))
