"""What becomes of rows and files that can't be read: they stop the run, or are left out, counted and said."""

from __future__ import annotations

import logging
from collections import Counter

from shardwright.data.records.files import Unreadable
from shardwright.errors import UserError

SAID = 10  # places that are named; the others are counted

_log = logging.getLogger(__name__)


class Unread:
    """Called with each row that can't be read. However often a row is met, it is counted once.

    Args:
        asked: what the user asked for, as errors say it.
        policy: "error" or "skip", of ``--on_bad_row``; or "list": they are left out and said by no log.

    Attributes:
        places: where each row lies that was left out, and why it can't be read.
    """

    def __init__(self, asked: str, policy: str) -> None:
        self.asked, self.policy = asked, policy
        self.places: dict[str, str] = {}

    def __call__(self, name: str, row: int | None, why: Unreadable) -> None:
        """A row of the file ``name``, from 1; None: the whole file.

        Raises:
            UserError: such rows are not skipped.
        """
        place = name if row is None else f"{name}, row {row}"
        if why.rest:
            place += " (it can't be read at all)" if row in (None, 1) else " to its end"
        if self.policy == "error":
            raise UserError(
                asked=self.asked,
                found=f"{place}: {why}",
                why="no record can be read there",
                instead="the file mended: a JSON object a line (.jsonl), Parquet, Arrow, or a table with a first line "
                "of names (.csv), in UTF-8; or --on_bad_row skip, which leaves such rows out and counts them",
            )
        if place not in self.places:
            self.places[place] = str(why)
            if self.policy == "skip" and len(self.places) <= SAID:
                _log.warning("left out: %s: %s", place, why)

    @property
    def tally(self) -> Counter[str]:
        """How many, and where the first of them lie, as :func:`shardwright.data.samples.tally.notes` reads it."""
        named = {f"unreadable {place}": 1 for place in list(self.places)[:SAID]}
        return Counter({"unreadable": len(self.places), **named} if self.places else {})
