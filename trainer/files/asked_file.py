"""Files that an option asks for."""

import os
from pathlib import Path

from shardwright.errors import UserError


def write_asked(path: str, option: str, text: str) -> None:
    """Writes ``text`` to the file that ``option`` names; UserError where that can't be."""
    try:
        Path(path).expanduser().write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(
            asked=f"{option} {path}",
            found=f"{type(error).__name__}: {error.strerror}",
            why="it can't be written there",
            instead="a file in a folder that is there and can be written to",
        ) from error


def check_new(path: str, option: str, example: str, ending: str = "") -> None:
    """Raises UserError unless ``path``, which ``option`` names, can be a new file with that ``ending``."""
    folder = os.path.dirname(path) or "."
    if os.path.lexists(path):
        found = "a file that is there already"
    elif not path.endswith(ending):
        found = f"a name that does not end in {ending}"
    elif not os.path.isdir(folder):
        found = f"no folder {folder}"
    else:
        return
    raise UserError(
        asked=f"{option} {path}",
        found=found,
        why=f"it is a new file{ending and f' whose name ends in {ending}'}; nothing is ever written over",
        instead=f"another name, such as {example}",
    )
