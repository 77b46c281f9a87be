"""The held-out sets that a log entry is of, by the names of its values."""

import re
from collections.abc import Iterable


def set_names(entry: Iterable[str]) -> list[str]:
    """The part between ``eval_`` and ``loss`` for each set of an entry: ``code_``, or nothing for the only set.

    Each set has a loss; a metric of one's own that ends in it, such as ``eval_code_router_loss``, has that beside it.
    """
    found = [match[1] for key in entry if (match := re.fullmatch(r"eval_((?:\w+_)?)loss", key))]
    return [name for name in found if not any(name != other and name.startswith(other) for other in found)]
