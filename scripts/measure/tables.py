"""Tables measured on this machine: a command line, and a process of its own for each measurement."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from shardwright.arguments.command_line import Parser


def run(
    tables: Mapping[str, Callable[[str, int], Table]], sides: Mapping[str, Callable[[Any], Any]], description: str
) -> int:
    """Print the table that the command line names; or, in a worker process, its measurement as JSON.

    Args:
        tables: name → function of (recipe, rounds) that makes the table.
        sides: name → function of the job that a worker runs.
    """
    parser = Parser(description)
    names = "{" + ",".join(tables) + "}"
    parser.add_argument("what", choices=[*tables, "worker"], metavar=names, help="the table to print")
    parser.add_argument("--recipe", default="mixtral_ep", help="the recipe whose own small model runs (mixtral_ep)")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured (3)")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.what == "worker":
        job = json.loads(args.job)
        print(json.dumps(sides[job["side"]](job)))
        return 0
    Console(width=140).print(tables[args.what](args.recipe, args.rounds))
    return 0


def worker(recipe: str, job: dict[str, Any], script: str) -> dict[str, Any]:
    command = [sys.executable, script, "worker", "--job", json.dumps({"recipe": recipe, **job})]
    variables = {**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables)
    if done.returncode:
        raise RuntimeError(f"a worker failed:\n{done.stderr[-4000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def model_config(job: dict[str, Any]) -> Any:
    """The config of the recipe's own model, with the sizes that the job names."""
    from transformers import AutoConfig

    from shardwright.layout.load_recipe import load_recipe

    changes: dict[str, Any] = {k: job[k] for k in ("num_hidden_layers", "hidden_size", "intermediate_size") if k in job}
    return AutoConfig.for_model(**dict(load_recipe(job["recipe"]).model or {}) | changes)


def resolved_job(job: dict[str, Any], config: Any, **options: Any) -> Any:
    """The trainer's Job for a worker's job: its recipe on ``config`` and this process's devices."""
    from dataclasses import replace

    from shardwright.arguments.training import Settings, TrainingArguments
    from shardwright.job import Job
    from shardwright.layout.load_recipe import load_recipe
    from shardwright.model.facts import facts_of
    from shardwright.xla.runtime import init_runtime

    init_runtime()
    recipe = load_recipe(job["recipe"])
    scan = job.get("scan", recipe.compute.scan)
    recipe = replace(recipe, compute=replace(recipe.compute, scan=scan))
    settings = Settings.of(TrainingArguments(recipe=job["recipe"], **options))
    return Job(recipe, settings, 8, facts_of(config))
