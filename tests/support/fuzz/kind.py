"""A kind of case: what is made once, how it is mutated, and what reads it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Kind:
    """One kind of case.

    Args:
        prepare: makes the artefacts in a folder, once a process; returns what ``run`` needs of them.
        cases: JSON-able cases.
        run: takes what ``prepare`` returned, a case and an empty folder, the working folder too; mutates, and reads.
        weight: how many of 100 cases are of this kind.
    """

    prepare: Callable[[Path], Any]
    cases: st.SearchStrategy[Any]
    run: Callable[[Any, Any, Path], None]
    weight: int
