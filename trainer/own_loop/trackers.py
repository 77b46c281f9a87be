"""LoopTrackers: accelerate's trackers of a loop of one's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from torch import Tensor

from shardwright.errors import UserError
from shardwright.hosts.hosts import hosts


class LoopTrackers:
    """The trackers that ``names`` ask for: a name, an object of accelerate's ``GeneralTracker``, or several.

    Raises UserError for one that accelerate does not know, or whose package is not installed.
    """

    def __init__(self, names: Any, folder: str | Path | None) -> None:
        several = names if isinstance(names, list | tuple) else [] if names is None else [names]
        here = [str(each) for each in get_available_trackers()]
        self._asked = [name for each in several for name in (here if str(each) == "all" else [each])]
        self._folder, self._begun = folder, list[Any]()
        for each in self._asked:
            if not isinstance(each, GeneralTracker) and str(each) not in here:
                known = str(each) in map(str, LOGGER_TYPE_TO_CLASS)
                raise UserError(
                    asked=f"log_with={str(each)!r}",
                    found="its package is not installed" if known else "no tracker of accelerate's",
                    why="the loop's values go to trackers through accelerate's classes",
                    instead=f"pip install {each}"
                    if known
                    else f"one of {', '.join(sorted(map(str, LOGGER_TYPE_TO_CLASS)))}",
                )

    def begin(self, project: str, config: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        if not hosts().first:
            return
        for each in self._asked:
            tracker: Any = each
            if not isinstance(each, GeneralTracker):
                kind = LOGGER_TYPE_TO_CLASS[str(each)]
                where = {"logging_dir": self._folder or "."} if kind.requires_logging_directory else {}
                tracker = kind(project, **where, **options.get(str(each), {}))
            if callable(begin := getattr(tracker, "start", None)):
                begin()
            if config:
                tracker.store_init_configuration(dict(config))
            self._begun.append(tracker)

    def log(self, values: Mapping[str, Any], step: int | None, options: Mapping[str, Any]) -> None:
        plain = {name: value.item() if isinstance(value, Tensor) else value for name, value in values.items()}
        for tracker in self._begun:
            tracker.log(plain, step=step, **options.get(tracker.name, {}))

    def end(self) -> None:
        for tracker in self._begun:
            tracker.finish()
        self._begun.clear()
