"""A record of the places in the code that made the errors of mistakes whose mends were tried."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from shardwright.errors import UserError
from tests.support.messages import Site

Line = tuple[str, int]


class Tried:
    """The mistakes that were made here, and the lines under which errors with their `instead` came to be."""

    def __init__(self) -> None:
        self.mistakes: set[str] = set()
        self.lines: set[Line] = set()
        self._made: list[tuple[str, list[Line]]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Notes each UserError that is made inside."""
        own = UserError.__init__

        def noted(error: UserError, *, asked: str, found: str, why: str, instead: str) -> None:
            own(error, asked=asked, found=found, why=why, instead=instead)
            self._made.append((instead, [*_lines(sys._getframe(1))]))

        self._made = []
        UserError.__init__ = noted  # type: ignore[method-assign]
        try:
            yield
        finally:
            UserError.__init__ = own  # type: ignore[method-assign]

    def note(self, mistake: str, error: UserError, mends: bool) -> None:
        """The ``mistake`` ended in ``error``, whose mends, if it has any, are tried."""
        self.mistakes.add(mistake)
        if mends:
            self.lines.update(*(lines for instead, lines in self._made if instead.endswith(error.instead)))

    def reaches(self, site: Site) -> bool:
        return any((site.path, line) in self.lines for line in range(site.first, site.last + 1))


def _lines(frame: FrameType | None) -> Iterator[Line]:
    while frame is not None:
        yield frame.f_code.co_filename, frame.f_lineno
        frame = frame.f_back
