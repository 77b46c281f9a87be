"""The manifest makes a checkpoint whole: it is written last, with the size and checksum of every other file.

A folder without a manifest was left by a save that was killed. An object store has no rename, so a folder can't be
published in one piece there; the manifest marks a whole one in a store as on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from trainer.errors import UserError
from trainer.storage import TEMPORARY, Folder

FORMAT = 1  # raise it when the meaning of what is written changes
MANIFEST = "manifest.json"
TENSORS = r"__\d+_\d+\.distcp"  # DCP's files of tensors: nearly all of a checkpoint's bytes
METADATA = ".metadata"  # DCP's list of the tensors and where they lie
TEXTS = ("host.json", "trainer_state.json", "training_args.json", "recipe.json", "plan.json", "config.json")
TOKENIZER = "tokenizer"
BLOCK = 16 << 20  # bytes that a check reads at a time
Checksum = dict[str, int | str]  # {"bytes": a file's size, "xxh3": its XXH3 checksum in hexadecimal}


def write_manifest(folder: Folder, files: Mapping[str, Checksum]) -> None:
    """Declares ``files`` (path in ``folder`` -> size and checksum) to be a whole checkpoint."""
    folder.write(MANIFEST, _as_bytes(files))


def checksum(data: bytes) -> Checksum:
    """Returns a file's size and checksum as the manifest holds them."""
    return {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}


def is_whole(folder: Folder) -> bool:
    """Whether its save ended. It may have been damaged since: see :func:`check`."""
    return folder.exists(MANIFEST)


def is_tensors(name: str) -> bool:
    """Whether a file of a checkpoint holds tensors; all others are small."""
    return bool(re.fullmatch(TENSORS, name))


def check(
    folder: Folder, names: Iterable[str] | None = None, progress: Callable[[int], None] = lambda count: None
) -> None:
    """Reads files of a checkpoint and compares their sizes and checksums with the manifest's.

    Args:
        names: which files, as the manifest names them; default: all.
        progress: called with each count of bytes that were read.

    Raises:
        UserError: names the file that is missing, cut short, or changed; or there is no manifest.
    """
    files = read_manifest(folder)
    for name in files if names is None else names:
        _check_file(folder, name, files[name], progress)


def _check_file(folder: Folder, name: str, written: Checksum, progress: Callable[[int], None]) -> None:
    owner, base = _resolve(folder, name)
    if not owner.exists(base):
        raise damaged(folder, f"{name} is missing")
    size = owner.size(base)
    if size != written["bytes"]:
        raise damaged(folder, f"{name} has {size:,} bytes, and had {written['bytes']:,} when it was written")
    state = xxhash.xxh3_64()
    with owner.open(base, "rb") as file:
        while block := file.read(BLOCK):
            state.update(block)
            progress(len(block))
    if state.hexdigest() != written["xxh3"]:
        raise damaged(folder, f"{name} has changed since it was written: its checksum is another")


def read_manifest(folder: Folder) -> dict[str, Checksum]:
    """Returns path in ``folder`` -> size and checksum, of every file of a checkpoint but the manifest itself.

    Raises:
        UserError: the manifest is missing, damaged, or of another format.
    """
    if not folder.exists(MANIFEST):
        raise UserError(
            asked=f"the checkpoint {folder}",
            found=f"no {MANIFEST} in it" if folder.names() else "no such folder, or an empty one",
            why=f"{MANIFEST} is written last: without it a save never ended, or the folder is another program's",
            instead="--resume_from_checkpoint latest, or the path of a checkpoint-N folder",
        )
    data = folder.read(MANIFEST)
    try:
        text = json.loads(data)
        files, version = text["files"], text["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(folder, f"{MANIFEST} can't be read ({error})") from None
    if data != _as_bytes(files, version):
        raise damaged(folder, f"{MANIFEST} has changed since it was written: its checksum is another")
    if version != FORMAT:
        raise UserError(
            asked=f"the checkpoint {folder}",
            found=f"format {version}",
            why=f"this version of Shardwright reads format {FORMAT}",
            instead="the version that wrote it (host.json in it says which)",
        )
    return files


def remove(folder: Folder) -> None:
    """Removes a checkpoint, its manifest first: if that is interrupted, the rest does not look whole."""
    folder.remove_file(MANIFEST)
    folder.remove()


def damaged(folder: Folder, found: str) -> UserError:
    """Returns the error that says what is wrong with a checkpoint's files."""
    return UserError(
        asked=f"the checkpoint {folder}",
        found=found,
        why="a state that is not what was saved must not be trained on",
        instead="an older checkpoint: --resume_from_checkpoint latest takes the newest whole one",
    )


def _as_bytes(files: Any, version: Any = FORMAT) -> bytes:
    """Returns the manifest's text, which holds a checksum of itself."""
    own = xxhash.xxh3_64_hexdigest(json.dumps([version, files]).encode())
    return json.dumps({"format": version, "files": files, "checksum": own}, indent=1).encode()


def _resolve(folder: Folder, name: str) -> tuple[Folder, str]:
    parent, _, base = name.rpartition("/")
    return (folder / parent if parent else folder), base


def ours(names: Sequence[str]) -> bool:
    """Whether all of these files of a folder are such as our saves write, so that it may be removed."""
    known = {MANIFEST, METADATA, TOKENIZER, *TEXTS}
    return all(name in known or name.endswith(TEMPORARY) or is_tensors(name) for name in names)
