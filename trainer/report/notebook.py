"""Progress bars in a notebook, drawn over by IPython itself: rich's own need the package ipywidgets."""

import importlib
import time
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn

_EVERY = 0.5  # seconds between two drawings, each a message to the browser


class _NotebookProgress(Progress):
    """A bar in the output of a notebook's cell, drawn again whenever it moves."""

    def __init__(self, *columns: ProgressColumn, console: Console, transient: bool, expand: bool) -> None:
        super().__init__(*columns, console=console, expand=expand, auto_refresh=False)
        self._transient, self._drawn = transient, 0.0
        self._handle: Any = None  # IPython's, of what it shows

    def start(self) -> None:
        if self._handle is None:
            # a kernel has it; no dependency of ours
            self._handle = importlib.import_module("IPython.display").display(
                self.make_tasks_table(self.tasks), display_id=True
            )

    def stop(self) -> None:
        if self._handle is not None:
            self._draw({"text/plain": ""} if self._transient else None)
            self._handle = None

    def refresh(self) -> None:
        if self._handle is not None and time.monotonic() - self._drawn >= _EVERY:
            self._draw()

    def update(self, *task: Any, **changes: Any) -> None:
        super().update(*task, **changes)
        self.refresh()

    def advance(self, *task: Any, **more: Any) -> None:
        super().advance(*task, **more)
        self.refresh()

    def _draw(self, instead: dict[str, str] | None = None) -> None:
        self._drawn, shown = time.monotonic(), instead or self.make_tasks_table(self.tasks)
        self._handle.update(shown, raw=instead is not None)


def live_progress(
    *columns: ProgressColumn, console: Console, transient: bool = False, expand: bool = False
) -> Progress:
    """A bar that its owner starts, shown on a terminal or in a notebook alone; if ``transient``, it vanishes."""
    if console.is_jupyter and not console.quiet:
        return _NotebookProgress(*columns, console=console, transient=transient, expand=expand)
    off = console.is_jupyter or not console.is_terminal
    return Progress(*columns, console=console, transient=transient, expand=expand, disable=off)
