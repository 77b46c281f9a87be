"""Measuring a model by tasks, for `scripts/evaluate.py`: from options to a table and a file of results."""

import json
import os
from typing import Any

from rich.console import Console

from shardwright.errors import UserError, did_you_mean
from shardwright.evaluation.evaluation_arguments import EvaluationArguments
from shardwright.files.asked_file import check_outputs, write_asked
from shardwright.hosts.hosts import hosts
from shardwright.job import Job
from shardwright.report.lines import Terminal, say, waiting


def run(options: EvaluationArguments, console: Console | None = None) -> dict[str, Any]:
    """Measure the model of ``options``, print lm-eval's table and write its results; returns them.

    Raises UserError for options that can't be, tasks that are unknown or whose data can't be read, or no lm_eval.
    """
    from shardwright.evaluation.lm import LM, generation_options  # first: its error says that there is no lm_eval

    # isort: split
    from lm_eval import simple_evaluate
    from lm_eval.utils import handle_non_serializable, make_table

    from shardwright.evaluation.open_model import open_model

    console = console or Terminal()
    written = {"--output_path": options.output_path}
    check_outputs(written, "the results are one JSON file, written after the tasks", vars(options))
    with waiting(console, "reading the tasks …"):
        manager, tasks, leaves = _load_tasks(options)

    def check(job: Job) -> None:
        """Refuse a task that can't be answered before the weights are read, and not behind hours of the others."""
        for task in leaves:
            if task.OUTPUT_TYPE == "generate_until":
                generation_options(task.config.generation_kwargs or {}, job.args.sequence_length)

    placed, tokenizer = open_model(options, console, check)
    console.quiet = console.quiet or not hosts().first
    lm = LM(placed, tokenizer, console)
    results: Any = simple_evaluate(
        lm,
        tasks=tasks,
        task_manager=manager,
        num_fewshot=options.num_fewshot,
        limit=options.limit,
        apply_chat_template=options.apply_chat_template,
        log_samples=False,
    )
    results["config"] |= {"model": options.model, "recipe": lm.job.recipe.name, "mesh": lm.job.plan.mesh}
    for table in ("results", *(["groups"] if "groups" in results else [])):
        console.print(make_table(results, table), markup=False, highlight=False, soft_wrap=True)
    shapes = ", ".join(f"{rows} × {length}" for rows, length in sorted(lm.score.guards))
    say(console, f"compiled {lm.score.compiles} times to score rows × tokens of {shapes or 'no shape'}")
    for (shape, _), generator in lm.generators.items():
        size = f"{shape.rows} × {shape.prompt} + {shape.new}"
        say(console, f"compiled {generator.compiles} times to generate rows × tokens of {size}")
    if options.output_path is not None and hosts().first:
        text = json.dumps(results, indent=2, default=handle_non_serializable, ensure_ascii=False)
        write_asked(options.output_path, "--output_path", text + "\n")
        say(console, f"results: {options.output_path}")
    return results


def _load_tasks(options: EvaluationArguments) -> tuple[Any, list[Any], list[Any]]:
    """The harness's task manager; the tasks and groups that ``--tasks`` names, with their data; each task of them."""
    from lm_eval.tasks import TaskManager

    if options.include_path is not None and not os.path.isdir(options.include_path):
        raise UserError(
            asked=f"--include_path {options.include_path}",
            found="no such folder",
            why="tasks of your own are YAML files in a folder",
            instead="the path of that folder",
        )
    manager, found, leaves = TaskManager(include_path=options.include_path, include_defaults=False), [], []
    if any(name not in manager.all_tasks for name in options.task_names):
        manager = TaskManager(include_path=options.include_path)  # the harness's own too, which take a while to list
    for name in options.task_names:
        if name not in manager.all_tasks:
            raise UserError(
                asked=f"--tasks {name}",
                found="lm-evaluation-harness knows no task, group or tag of that name",
                why="a task is a YAML file, its own or one in --include_path",
                instead=f"{did_you_mean(name, manager.all_tasks)}one that `lm-eval ls tasks` lists",
            )
        try:
            loaded: Any = manager.load([name])
        except Exception as error:  # of the harness's, datasets' and the hub's kinds
            raise UserError(
                asked=f"--tasks {name}",
                found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
                why="the task or its data can't be read",
                instead="network to the hub or its cache, and in a task of your own the keys that the harness knows",
            ) from error
        leaves += loaded["tasks"].values()
        found += [loaded["groups"][name]] if name in loaded["groups"] else list(loaded["tasks"].values())
    return manager, found, leaves
