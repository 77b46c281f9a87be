"""The libtpu to compile with: the installed one, or another beside it."""

import importlib.util
import os
import re
from dataclasses import dataclass
from pathlib import Path

from shardwright.errors import UserError
from shardwright.files.cache import cache_root

_FILE = "libtpu.so"


@dataclass(frozen=True)
class Library:
    """A libtpu; ``version`` is its package's, or size and date of a file that is in none."""

    path: Path
    version: str


def find_library(asked: str | None = None) -> Library:
    """The library that ``asked`` names: a file, a folder with one, a version; None: TPU_LIBRARY_PATH, or the installed.

    A version is looked for in the cache's folder ``libtpu/VERSION``, where pip puts it with ``--target``.

    Raises:
        UserError: there is none.
    """
    if asked is None:
        given = os.environ.get("TPU_LIBRARY_PATH")
        if given and not os.path.isfile(given):
            raise UserError(
                asked=f"TPU_LIBRARY_PATH={given}",
                found="no such file",
                why="a TPU run loads that one, and another compiler would tell of other numbers",
                instead="the path of a libtpu.so; or unset TPU_LIBRARY_PATH, for the one that is installed",
            )
        if (found := installed()) is None:
            raise UserError(
                asked="compiling for a TPU",
                found="libtpu is not installed",
                why="it holds the compiler; it needs no TPU to run",
                instead="pip install 'shardwright[tpu]'",
            )
        return found
    path = Path(os.path.expanduser(asked))
    if path.exists():
        if (found := _in_folder(path)) is None:
            raise UserError(
                asked=f"--libtpu {asked}",
                found=f"no {_FILE} there",
                why="a folder is searched for it, and for libtpu/ with it, as pip leaves one",
                instead=f"the path of a {_FILE}, or a folder that pip install --target made",
            )
        return found
    folder = cache_root() / "libtpu" / asked
    here = installed()
    if here is not None and here.version == asked:
        return here
    of_version = re.fullmatch(r"\d+(\.\w+)+", asked)
    if of_version and (found := _in_folder(folder)) is not None:
        return found
    raise UserError(
        asked=f"--libtpu {asked}",
        found="no file or folder of that name" + f", and no such version in {folder.parent}" * bool(of_version),
        why=f"the one installed here is {here.version if here else 'none'}",
        instead=f"pip install --no-deps --target {folder} libtpu=={asked}"
        if of_version
        else "a version, such as 0.0.52, or the path of a libtpu.so",
    )


def installed() -> Library | None:
    """The library at TPU_LIBRARY_PATH, or else of the package, if there is one."""
    given = os.environ.get("TPU_LIBRARY_PATH")  # torch_xla sets it too, to the installed one
    if given and os.path.isfile(given):
        return _library(Path(given))
    spec = importlib.util.find_spec("libtpu")
    return None if spec is None or spec.origin is None else _in_folder(Path(spec.origin).parent)


def _in_folder(path: Path) -> Library | None:
    """The library at ``path``, or in the folder."""
    places = (path, path / _FILE, path / "libtpu" / _FILE)
    return next((_library(place) for place in places if place.is_file()), None)


def _library(path: Path) -> Library:
    path = path.resolve()
    packages = sorted(path.parent.parent.glob("libtpu-*.dist-info")) if path.parent.name == "libtpu" else []
    if packages:
        return Library(path, packages[-1].name.removeprefix("libtpu-").removesuffix(".dist-info"))
    stat = path.stat()
    return Library(path, f"of {stat.st_size} bytes, {stat.st_mtime_ns}")
