"""Files of this machine that a run's options name: each must be where the hosts find it too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from shardwright.errors import UserError
from shardwright.launch.ray_job import NOT_SENT, ROOT
from shardwright.launch.request import IMAGE_FOLDER, of_one_host

if TYPE_CHECKING:
    from shardwright.arguments.training import TrainingArguments

_OPTIONS = ("recipe", "model", "tokenizer", "adapter", "teacher", "chat_template", "sample_prompts")
# what else an option takes that each host can get by itself; of the others, a hub id
_ELSEWHERE = {
    "recipe": "auto or another name of docs/recipes.md, or ",
    "sample_prompts": "",
    **dict.fromkeys(("dataset", "eval_dataset"), "a hub id, or a path in a bucket, or "),
}
_NOT_IN_IMAGE = {".git", ".venv", "launch", "output", "shared"}  # .dockerignore


def check_inputs(args: TrainingArguments, target: str, *, container: bool, mounted: str) -> None:
    """Raises UserError for a file or folder of this machine alone that the hosts would look for.

    In a ``container`` the repository is there, as in Ray's job; tpu-vm without one sends the recipe. ``mounted``: the
    folder that all hosts share; empty: none.
    """
    left_out = _NOT_IN_IMAGE if container else NOT_SENT if target == "ray" else None
    for option, path in _named(args):
        there = mounted and Path(os.path.normpath(path)).is_relative_to(mounted)
        sent = option == "recipe" if left_out is None else _in_checkout(path, left_out)
        here = Path(os.path.expanduser(path))
        alone = of_one_host(path) or (here.is_relative_to(ROOT) and str(ROOT) != IMAGE_FOLDER)
        if there or sent or not alone or not os.path.exists(here):
            continue
        shared = "a disk that all hosts mount" if not container else mounted or "--mount SOURCE:PATH"
        image = ", or built into the image, as all of this checkout is" * container
        image += ", or a path in this checkout, which is sent" * (target == "ray")
        raise UserError(
            asked=f"--{option} {path}",
            found="a path of this machine, which is sent to no host",
            why=f"{target} starts the run on other machines, where nothing lies at that path",
            instead=f"{_ELSEWHERE.get(option, 'a hub id, or ')}a copy of it under {shared}{image}",
        )


def _named(args: TrainingArguments) -> Iterator[tuple[str, str]]:
    """Option and path of each input that may be a file or folder."""
    from shardwright.data.rows.mixture import sources_of

    for name in _OPTIONS:
        value = getattr(args, name)
        if value and (name != "recipe" or value.endswith(".py")):
            yield name, value
    for name, datasets in (("dataset", [args.dataset]), ("eval_dataset", args.eval_sets.values())):
        yield from ((name, str(source.dataset)) for text in filter(None, datasets) for source in sources_of(text))


def _in_checkout(path: str, left_out: set[str]) -> bool:
    """Whether ``path``, from the hosts' copy of this checkout, is the file that it is here."""
    here, there = Path(os.path.expanduser(path)).resolve(), (ROOT / path).resolve()
    if os.path.isabs(path) or here != there or not here.is_relative_to(ROOT):
        return False
    return not left_out & {*here.relative_to(ROOT).parts[:1]}
