"""The checkpoints of an output folder, and those of them that are the live run's: its lineage.

The checkpoints of a run are the folders `checkpoint-N` of its output folder, N being the step. When a run goes on from
an older one, or starts anew beside old ones, the others stay, but are set aside: `latest` does not find them, and they
are neither counted nor removed. `lineage.json` lists the steps of the live run, oldest first. A step is listed there
before its checkpoint is whole, and one that never became whole counts for nothing and is left alone. It also names the
run's last life: a checkpoint that an earlier life staged elsewhere is not the live run's.
"""

import json
import re
from collections.abc import Iterable

from shardwright.checkpoint import manifest
from shardwright.errors import UserError
from shardwright.files.folder import Folder

NAME = re.compile(r"checkpoint-(\d+)")
LINEAGE = "lineage.json"
Lineage = dict[int, str]  # step -> the mark of its checkpoint (`manifest.mark`), oldest first


def folder_of(output: Folder, step: int) -> Folder:
    return output / f"checkpoint-{step}"


def noted(checkpoint: Folder, output: Folder) -> str:
    """A run's note of a checkpoint: its name if it lies in ``output``, so that both may move; else its path."""
    return checkpoint.name if checkpoint.parent == output else checkpoint.absolute


def noted_folder(text: str, output: Folder) -> Folder:
    """The checkpoint that a run in ``output`` noted as ``text``."""
    return Folder(text) if "/" in text else output / text


def steps_in(output: Folder) -> list[int]:
    """The steps of the checkpoints in ``output``, oldest first, whole or not."""
    return sorted(int(match[1]) for name in output.names() if (match := NAME.fullmatch(name)))


def whole_steps(output: Folder) -> list[int]:
    """The steps of the checkpoints in ``output`` whose save ended, oldest first, set aside or not."""
    return [step for step in steps_in(output) if manifest.is_whole(folder_of(output, step))]


def noted_steps(output: Folder) -> list[int]:
    """The steps that `lineage.json` lists, oldest first, whole or not, or removed since; UserError if it is damaged.

    In a folder without a `lineage.json`, to which checkpoints were copied, none is set aside.
    """
    if not output.exists(LINEAGE):
        return steps_in(output)
    data = output.read(LINEAGE)
    try:
        return [int(step) for step in json.loads(data)["steps"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(
            asked=f"the checkpoints of {output}",
            found=f"{LINEAGE} can't be read ({error})",
            why="it says which of them are the run's, and which were set aside",
            instead=f"the path of one of them as --resume_from_checkpoint; or remove {output}/{LINEAGE}, if none of "
            "them is to be set aside",
        ) from None


def saved_steps(output: Folder) -> dict[int, bool]:
    """Step → whether its save ended, of the live run's checkpoints, oldest first; UserError as :func:`noted_steps`.

    Each is asked for by its name: the store's listing may lack the newest.
    """
    found = {step: manifest.is_whole(folder_of(output, step)) for step in noted_steps(output)}
    return {step: whole for step, whole in found.items() if whole or folder_of(output, step).names()}


def live_steps(output: Folder) -> list[int]:
    """The steps of the live run's checkpoints whose save ended, oldest first; UserError as :func:`noted_steps`."""
    return [step for step, whole in saved_steps(output).items() if whole]


def run_of(output: Folder) -> str | None:
    """The life that the live run began last; None where no `lineage.json` says so."""
    data = output.read(LINEAGE) if output.exists(LINEAGE) else b"{}"
    try:
        return str(json.loads(data)["run"])
    except (ValueError, KeyError, TypeError, RecursionError):  # damaged, or without a life
        return None


def write_lineage(output: Folder, steps: Iterable[int], run: str) -> None:
    """Declare the checkpoints of ``steps`` the live run's, in its life ``run``; all others are set aside."""
    output.write(LINEAGE, (json.dumps({"steps": list(steps), "run": run}) + "\n").encode())


def line_to(output: Folder, step: int, ancestors: Lineage) -> Lineage:
    """The lineage of ``output``'s checkpoint of ``step``: its noted ``ancestors`` that are unchanged since, and it."""
    whole = [other for other in ancestors if manifest.is_whole(folder_of(output, other))]
    marks = {other: manifest.mark(folder_of(output, other)) for other in whole}
    line = {other: mark for other, mark in ancestors.items() if marks.get(other) == mark}
    return line | {step: manifest.mark(folder_of(output, step))}
