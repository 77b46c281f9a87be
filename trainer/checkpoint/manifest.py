"""What makes a checkpoint whole: its manifest, written last, with the size and checksum of every other file.

A folder without one is what a killed save left; nothing in an object store can be renamed, so this is the mark there
as on disk.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from trainer.errors import UserError
from trainer.storage import TEMPORARY, Folder

FORMAT = 1  # raise it when what is written changes meaning
MANIFEST = "manifest.json"
TENSORS = r"__\d+_\d+\.distcp|\.metadata"  # DCP's files
TEXTS = ("host.json", "trainer_state.json", "training_args.json", "recipe.json", "plan.json", "config.json")
TOKENIZER = "tokenizer"
BLOCK = 16 << 20  # bytes that a check reads at a time
Checksum = dict[str, int | str]


def write_manifest(folder: Folder, files: Mapping[str, Checksum]) -> None:
    """Declare ``files`` of ``folder`` (relative path -> size and checksum) to be a whole checkpoint."""
    folder.write(MANIFEST, _as_bytes(files))


def checksum(data: bytes) -> Checksum:
    """Size in bytes and checksum, as the manifest has them."""
    return {"bytes": len(data), "xxh3": xxhash.xxh3_64_hexdigest(data)}


def is_whole(folder: Folder) -> bool:
    """Whether a save of it ended: it may have been damaged since, see :func:`check`."""
    return folder.exists(MANIFEST)


def check(folder: Folder, progress: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Read every file and compare size and checksum with the manifest's.

    Args:
        progress: called with (bytes read, bytes in all).

    Raises:
        UserError: names the file that is missing, cut short, or changed; or there is no manifest.
    """
    files = read_manifest(folder)
    done, total = 0, sum(int(entry["bytes"]) for entry in files.values())
    for name, entry in files.items():
        owner, base = _resolve(folder, name)
        if not owner.exists(base):
            raise damaged(folder, f"{name} is missing")
        size = owner.size(base)
        if size != entry["bytes"]:
            raise damaged(folder, f"{name} has {size:,} bytes, and had {entry['bytes']:,} when it was written")
        state = xxhash.xxh3_64()
        with owner.open(base, "rb") as file:
            while block := file.read(BLOCK):
                state.update(block)
                done += len(block)
                progress(done, total)
        if state.hexdigest() != entry["xxh3"]:
            raise damaged(folder, f"{name} has changed since it was written: its checksum is another")


def read_manifest(folder: Folder) -> dict[str, Checksum]:
    """Relative path -> size and checksum of every file of a checkpoint but the manifest.

    Raises:
        UserError: no manifest, a damaged one, or one of another format.
    """
    if not folder.exists(MANIFEST):
        raise UserError(
            asked=f"the checkpoint {folder}",
            found=f"no {MANIFEST} in it" if folder.names() else "no such folder, or an empty one",
            why=f"{MANIFEST} is written last: without it a save never ended, or another program's",
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
    """Remove a checkpoint, its manifest first: what a kill leaves of it is not taken for a whole one."""
    folder.remove_file(MANIFEST)
    folder.remove()


def damaged(folder: Folder, found: str) -> UserError:
    return UserError(
        asked=f"the checkpoint {folder}",
        found=found,
        why="a state that is not what was saved must not be trained on",
        instead="an older checkpoint: --resume_from_checkpoint latest takes the newest whole one",
    )


def _as_bytes(files: Any, version: Any = FORMAT) -> bytes:
    checksum = xxhash.xxh3_64_hexdigest(json.dumps([version, files]).encode())
    return json.dumps({"format": version, "files": files, "checksum": checksum}, indent=1).encode()


def _resolve(folder: Folder, name: str) -> tuple[Folder, str]:
    parent, _, base = name.rpartition("/")
    return (folder / parent if parent else folder), base


def ours(names: Sequence[str]) -> bool:
    """Whether a folder of these files is what a save of ours left, so that it may be removed."""
    known = {MANIFEST, TOKENIZER, *TEXTS}
    return all(name in known or name.endswith(TEMPORARY) or re.fullmatch(TENSORS, name) for name in names)
