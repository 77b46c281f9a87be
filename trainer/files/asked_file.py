"""Files that an option asks for."""

import contextlib
import errno
import os
from collections.abc import Mapping

from shardwright.errors import UserError


def write_asked(path: str, option: str, text: str, *, new: bool = False) -> None:
    """Writes ``text`` to the file that ``option`` names, a ``new`` one, whole or not at all; else raises UserError."""
    file = os.path.realpath(os.path.expanduser(path))
    beside = (os.path.isfile(file) or not os.path.exists(file)) and os.access(os.path.dirname(file), os.W_OK)
    written = f"{file}.partial" if beside else file  # a pipe, a device, or a file of another's folder
    try:
        if new and os.path.lexists(file):
            raise FileExistsError(errno.EEXIST, "File exists")
        try:
            with open(written, "w", encoding="utf-8") as out:
                out.write(text)
            if beside:
                os.replace(written, file)
        except OSError:
            if beside:
                with contextlib.suppress(OSError):
                    os.remove(written)
            raise
    except OSError as error:
        raise UserError(
            asked=f"{option} {path}",
            found=f"{type(error).__name__}: {error.strerror}",
            why="it can't be written there",
            instead="a file in a folder that is there and can be written to",
        ) from error


def check_outputs(written: Mapping[str, str | None], why: str, read: Mapping[str, object]) -> None:
    """Raises UserError unless each option can write the file it names, and no two options name the same file.

    ``written``: option → its file, None for none. ``read``: name of each option → its value, of which the paths of
    files count.
    """
    others = [value for name, value in read.items() if f"--{name}" not in written]
    inputs = [os.path.expanduser(path) for path in others if isinstance(path, str)]
    taken = {os.path.realpath(path): "a file that is read" for path in inputs if os.path.isfile(path)}
    for option, path in written.items():
        if path is None:
            continue
        check_writable(path, option, why)
        file = os.path.realpath(os.path.expanduser(path))
        if file in taken:
            raise UserError(
                asked=f"{option} {path}",
                found=taken[file],
                why="what is written last would be all that is left",
                instead="another file",
            )
        taken[file] = f"the file of {option} too"


def check_writable(path: str, option: str, why: str) -> None:
    """Raises UserError unless a file can be written at ``path``, which ``option`` names."""
    file = os.path.abspath(os.path.expanduser(path))
    folder = os.path.dirname(file)
    if os.path.isdir(file):
        found = "a folder"
    elif not os.access(file if os.path.exists(file) else folder, os.W_OK):
        found = "a file that can't be written" if os.path.exists(file) else f"{folder} is no folder that can be written"
    else:
        return
    raise UserError(asked=f"{option} {path}", found=found, why=why, instead="a file in a folder that exists")


def check_new(path: str, option: str, example: str, ending: str = "") -> None:
    """Raises UserError unless ``path``, which ``option`` names, can be a new file with that ``ending``."""
    file = os.path.expanduser(path)
    folder = os.path.dirname(file) or "."
    if os.path.lexists(file):
        found = "a file that is there already"
    elif not path.endswith(ending):
        found = f"a name that does not end in {ending}"
    elif not os.path.isdir(folder):
        found = f"no folder {folder}"
    elif not os.access(folder, os.W_OK):
        found = f"a folder {folder} that can't be written to"
    else:
        return
    raise UserError(
        asked=f"{option} {path}",
        found=found,
        why=f"it is a new file{ending and f' whose name ends in {ending}'}; nothing is ever written over",
        instead=f"another name, such as {example}",
    )
