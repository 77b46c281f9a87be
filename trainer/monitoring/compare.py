"""Output folders of runs, read to be compared: `scripts/compare.py`."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardwright.checkpoint.lineage import folder_of, noted_steps
from shardwright.errors import UserError
from shardwright.files.folder import Folder
from shardwright.report.compare_view import ComparedRun
from shardwright.report.run_view import PAGE

STATE, OPTIONS = "trainer_state.json", "training_args.json"
_ITS_OWN = ("output_dir", "run_name", "resume_from_checkpoint")  # options that name the run itself


def read_runs(paths: Sequence[str], page: str) -> list[ComparedRun]:
    """The runs in the output folders ``paths``, with links to their pages from the file ``page``.

    Raises UserError for a folder without a run's log.
    """
    folders = [Folder(path.rstrip("/") or path) for path in paths]
    ends = [folder.name for folder in folders]
    names = [end if ends.count(end) == 1 else str(folder) for folder, end in zip(folders, ends, strict=True)]
    return [_run(folder, name, page) for folder, name in zip(folders, names, strict=True)]


def _run(folder: Folder, name: str, page: str) -> ComparedRun:
    there, options = set(folder.names()), {}
    if OPTIONS in there:
        options = {key: value for key, value in _content(folder, OPTIONS).items() if key not in _ITS_OWN}
    link = ""
    if PAGE in there and not folder.remote:
        link = os.path.relpath(str(folder / PAGE), Path(page).absolute().parent)
    return ComparedRun(name, _log(folder, there), options, link)


def _log(folder: Folder, there: set[str]) -> list[dict[str, Any]]:
    """The log of the run's start or end, or that of its newest checkpoint if it goes further; so are transformers'."""
    steps = [step for step in noted_steps(folder) if folder_of(folder, step).is_file(STATE)]
    homes = [folder] * (STATE in there) + [folder_of(folder, step) for step in sorted(steps)[-1:]]
    logs = (_lines(home, folder) for home in homes)
    if log := max(logs, key=lambda log: max((line["step"] for line in log), default=0), default=[]):
        return log
    found = f"no line of a log in a {STATE}, here or in a checkpoint"
    raise _refused(folder, found if there else "no such folder, or an empty one")


def _lines(home: Folder, run: Folder) -> list[dict[str, Any]]:
    log = _content(home, STATE).get("log_history")
    if isinstance(log, list) and all(isinstance(x, dict) and type(x.get("step")) is int for x in log):
        return log
    raise _refused(run, f"a {STATE} without the lines of a log")


def _content(folder: Folder, name: str) -> dict[str, Any]:
    try:
        content = json.loads(folder.read(name))
    except (ValueError, RecursionError) as error:
        raise _refused(folder, f"{name} can't be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise _refused(folder, f"{name} has no names with values")
    return content


def _refused(folder: Folder, found: str) -> UserError:
    return UserError(
        asked=f"the run in {folder}",
        found=found,
        why="a run is compared by the log that it writes with each checkpoint, and at its end",
        instead="the --output_dir of a run that has saved a checkpoint",
    )
