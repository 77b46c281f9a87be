"""A name and a home for a process whose user number the system does not know, as containers run them."""

import os
import pwd
import tempfile
from pathlib import Path


def name_user() -> None:
    """Sets ``LOGNAME`` and ``HOME`` where neither the environment nor the system knows them.

    torch fails to import without a name. Without a home, libraries would put their caches into a folder ``~``.
    """
    number = os.getuid()
    try:
        pwd.getpwuid(number)
    except KeyError:
        os.environ.setdefault("LOGNAME", str(number))
        if not os.environ.get("HOME"):
            home = Path(tempfile.gettempdir(), f"home-{number}")  # of all processes of this user
            home.mkdir(mode=0o700, exist_ok=True)
            os.environ["HOME"] = str(home) if home.stat().st_uid == number else tempfile.mkdtemp()
