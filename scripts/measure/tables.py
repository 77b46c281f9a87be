"""Tables measured on this machine, each measurement in a process of its own; and the small models that are measured."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from rich.console import Console
from rich.table import Table
from transformers import AutoConfig, PretrainedConfig

from shardwright.arguments.command_line import Parser
from shardwright.arguments.training import Settings, TrainingArguments
from shardwright.job import Job
from shardwright.layout.load_recipe import load_recipe
from shardwright.model.facts import facts_of
from shardwright.xla.runtime import init_runtime

RECIPE, DEVICES = "mixtral_ep", 8
T = TypeVar("T")


def run(tables: Mapping[str, Callable[[int], Table]], description: str | None) -> None:
    """Print the table that the command line names; ``tables``: name → function of the number of rounds."""
    parser = Parser(description)
    parser.add_argument("what", choices=list(tables), metavar="{" + ",".join(tables) + "}", help="the table to print")
    parser.add_argument("--rounds", type=int, default=3, help="how often each side is measured (3)")
    args = parser.parse_args()
    Console(width=140).print(tables[args.what](args.rounds))


def apart(measure: Callable[..., T], *args: Any) -> T:
    """``measure(*args)``, called in a process of its own that shares nothing with this one."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return process.submit(measure, *args).result()


def model_config(**changes: Any) -> PretrainedConfig:
    """The config of the recipe's own model, with these sizes."""
    return AutoConfig.for_model(**dict(load_recipe(RECIPE).model or {}) | changes)


def job_of(config: PretrainedConfig, scan: bool = True, **options: Any) -> Job:
    """The trainer's job for the recipe on ``config`` and this process's devices."""
    init_runtime()
    recipe = load_recipe(RECIPE)
    recipe = replace(recipe, compute=replace(recipe.compute, scan=scan))
    return Job(recipe, Settings.of(TrainingArguments(recipe=RECIPE, **options)), DEVICES, facts_of(config))
