"""A name and a home for a process whose user number the system does not know, as containers run them."""

from __future__ import annotations

import os
import pwd
import tempfile
from pathlib import Path


def name_user() -> None:
    """Sets ``LOGNAME`` and ``HOME`` where neither the environment nor the system's list of users says them.

    torch asks for the name when it is imported, and fails without one. Without a home, libraries would put their caches
    into a folder called ``~``.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        os.environ.setdefault("LOGNAME", str(number))
        if not os.environ.get("HOME"):
            os.environ["HOME"] = _home(number)


def _home(number: int) -> str:
    """The same folder in every process of this user, unless another user holds it."""
    home = Path(tempfile.gettempdir(), f"home-{number}")
    home.mkdir(mode=0o700, exist_ok=True)
    return str(home) if home.stat().st_uid == number else tempfile.mkdtemp()
