"""Files that an option asks for."""

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
