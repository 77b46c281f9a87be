"""Parts of records that are not read: columns, counted, and by a policy rows and files that can't be read.

Such rows stop the run, or are left out, counted and reported.
"""

import logging
from collections import Counter
from collections.abc import Iterable

from shardwright.data.records.fields import counted
from shardwright.data.records.files import Unreadable
from shardwright.errors import UserError

SAID = 10  # most places that are named; the others are counted

_log = logging.getLogger(__name__)


class Unread:
    """Called with each unreadable row. A row is counted once, however often it is met.

    Args:
        asked: the user's words for the dataset, for errors.
        policy: "error" or "skip", of ``--on_bad_row``; or "list": rows are left out without a log line.

    Attributes:
        places: place of each left-out row → why it can't be read.
        columns: each column that is not read, with its type → the records that have it.
    """

    def __init__(self, asked: str, policy: str) -> None:
        self.asked, self.policy = asked, policy
        self.places: dict[str, str] = {}
        self.columns: Counter[str] = Counter()
        self._last: dict[str, int] = {}  # of each file or part, the last row whose columns are counted

    def __call__(self, name: str, row: int | None, why: Unreadable) -> None:
        """Report a row (from 1) of the file ``name``; None: the whole file. UserError unless they are skipped."""
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

    def count(self, name: str, row: int, columns: Iterable[str]) -> None:
        """Count the columns that are not read of a row (from 1), once however often it is met; rows come in order."""
        if row > self._last.get(name, 0):
            self._last[name] = row
            self.columns.update(columns)

    @property
    def tally(self) -> Counter[str]:
        """The count and the first places, as :func:`shardwright.data.samples.tally.notes` reads them."""
        named = {f"unreadable {place}": 1 for place in list(self.places)[:SAID]}
        return Counter({"unreadable": len(self.places), **named} if self.places else {}) + counted(self.columns)
