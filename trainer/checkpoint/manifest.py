"""The manifest makes a checkpoint whole: it is written last, with the size and checksum of every other file.

A folder without a manifest was left by a save that was killed. An object store has no rename, so a folder can't be
published in one piece there; the manifest marks a whole one in a store as on disk.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import xxhash

from shardwright.errors import UserError
from shardwright.files.folder import TEMPORARY, Folder, StorageError, StorageRefusal
from shardwright.files.hub_names import ADAPTER_CONFIG
from shardwright.hosts.hosts import hosts

FORMAT = 2  # raise it when the meaning of what is written changes
MANIFEST = "manifest.json"
# tensor files, nearly all of a checkpoint's bytes, and the list of the tensors; the second are format 1's
TENSORS = re.compile(r"tensors-(\d+)-\d+\.safetensors|__(\d+)_\d+\.distcp")
INDEX, METADATA = "tensors.json", ".metadata"
GENERATION = "generation_config.json"  # of a base that has one
TEXTS = ("host.json", "trainer_state.json", "training_args.json", "recipe.json", "plan.json", "config.json")
TOKENIZER = "tokenizer"
TRASH = re.compile(r"trash-\d+")  # in the output folder: checkpoints moved out of the way
BLOCK = 16 << 20  # bytes that a check reads at a time
LARGEST = 1 << 32  # bytes of a file that is read whole; the list of tensors takes some 150 for each shard
LARGEST_MANIFEST = 64 << 20
_LATEST = "--resume_from_checkpoint latest, in a run, takes the newest whole one"
_WHOLE = f"the path of a whole checkpoint-N; {_LATEST}"
Checksum = dict[str, int | str]  # {"bytes": a file's size, "xxh3": its XXH3 checksum in hexadecimal}


def write_manifest(folder: Folder, files: Mapping[str, Checksum]) -> None:
    """Declares ``files``, by their paths in ``folder``, to be a whole checkpoint."""
    folder.write(MANIFEST, _as_bytes(files))


def mark(folder: Folder) -> str:
    """The checksum of a checkpoint's manifest, hence of all its files: it tells the checkpoint from every other."""
    return xxhash.xxh3_64_hexdigest(folder.read(MANIFEST))


def check_written(folder: Folder, files: Mapping[str, Checksum]) -> None:
    """Raises StorageError unless the files just written are there and as large; reads the manifest alone."""
    wrong = [name for name, entry in files.items() if not folder.exists(name) or folder.size(name) != entry["bytes"]]
    if not wrong and (not folder.exists(MANIFEST) or folder.read(MANIFEST) != _as_bytes(files)):
        wrong = [MANIFEST]
    if wrong:
        raise StorageRefusal(
            asked=f"to write {folder}",
            found=f"{wrong[0]} is gone, or is not what this run wrote",
            why="something else writes or removes files there",
            instead="an --output_dir of its own for each run, and no other program that writes there",
        )


def checksum(data: bytes) -> Checksum:
    return stream_checksum([data])


def stream_checksum(blocks: Iterable[bytes | memoryview], *takers: Callable[[Any], object]) -> Checksum:
    """The size and checksum of a file of these ``blocks``, each of which the ``takers`` get on the way."""
    state, size = xxhash.xxh3_64(), 0
    for block in blocks:
        hosts().watchdog.progressed()
        state.update(block)
        size += len(block)
        for take in takers:
            take(block)
    return {"bytes": size, "xxh3": state.hexdigest()}


def is_whole(folder: Folder) -> bool:
    """Whether its save ended. It may have been damaged since: see :func:`check`."""
    return folder.exists(MANIFEST)


def writer_of(name: str) -> int:
    """The number of the host that wrote a file: each host its own tensors, the first host all else."""
    match = TENSORS.fullmatch(name)
    return int(match[1] or match[2]) if match else 0


def format_of(files: Iterable[str]) -> int:
    return 1 if METADATA in files else FORMAT


def check(
    folder: Folder, files: Mapping[str, Checksum] | None = None, progress: Callable[[int], None] = lambda count: None
) -> None:
    """Raises UserError, which names the file, unless ``files``, by default all of the manifest, are as written."""
    for name, written in (read_manifest(folder) if files is None else files).items():
        _check_is_file(folder, name)
        size = folder.size(name)
        if size != written["bytes"]:
            raise damaged(folder, f"{name} has {size:,} bytes, and had {written['bytes']:,} when it was written")
        if size > LARGEST and not TENSORS.fullmatch(name):
            raise damaged(folder, f"{name} has {size:,} bytes; what is read whole has {LARGEST:,} at most")
        with folder.open(name, "rb") as file:
            found = stream_checksum(iter(lambda: file.read(BLOCK), b""), lambda block: progress(len(block)))
        if found != written:
            raise damaged(folder, f"{name} has changed since it was written: its checksum is another")


def _check_is_file(folder: Folder, name: str) -> None:
    if not folder.exists(name):
        raise damaged(folder, f"{name} is missing")
    if not folder.is_file(name):
        raise damaged(folder, f"{name} is no file of its own, but a link, a folder, a pipe or a device")


def read_manifest(folder: Folder) -> dict[str, Checksum]:
    """The size and checksum of each other file of a checkpoint; raises UserError if there is no good manifest."""
    if not folder.exists(MANIFEST):
        names = folder.names()
        found = f"no {MANIFEST} in it" if names else "no such folder, or an empty one"
        why = f"{MANIFEST} is written last: without it a save never ended, or the folder is another program's"
        runs = [name for name in names if re.fullmatch(r"checkpoint-\d+", name) and (folder / name).exists(MANIFEST)]
        instead = str(folder / max(runs, key=lambda name: int(name[11:]))) if runs else _WHOLE
        raise damaged(folder, found, why, instead)
    _check_is_file(folder, MANIFEST)
    if (size := folder.size(MANIFEST)) > LARGEST_MANIFEST:
        raise damaged(folder, f"{MANIFEST} has {size:,} bytes, and lists a few files")
    data = folder.read(MANIFEST)
    try:
        text = json.loads(data)
        files, version = text["files"], text["format"]
        same = data == _as_bytes(files, version)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise damaged(folder, f"{MANIFEST} can't be read ({type(error).__name__}: {error})") from None
    if not same:
        raise damaged(folder, f"{MANIFEST} has changed since it was written: its checksum is another")
    if not isinstance(files, dict):
        raise damaged(folder, f"{MANIFEST} lists no files")
    if type(version) is not int or version != format_of(files):
        why = f"this version of Shardwright reads formats 1 to {FORMAT}"
        raise damaged(
            folder, f"format {str(version)[:80]}", why, "the version that wrote it (host.json in it says which)"
        )
    for name, entry in files.items():
        if not _is_entry(name, entry):
            found = f"{MANIFEST} lists {name[:200]!r}: no name of a checkpoint's file, or not its size and checksum"
            raise damaged(folder, found)
    return files


def _is_entry(name: str, entry: Any) -> bool:
    base = name.removeprefix(f"{TOKENIZER}/")
    parts = base.split("/")  # a tokenizer's files may lie in subfolders
    if not base.isprintable() or "\\" in base or not {"", ".", "..", MANIFEST}.isdisjoint(parts):
        return False
    if base == name and len(parts) > 1:
        return False
    match entry:
        case {"bytes": int(size), "xxh3": str(digest)} if len(entry) == 2:
            return type(size) is int and 0 <= size < 1 << 62 and len(digest) == 16
    return False


def make_room(folder: Folder) -> str | None:
    """Moves a checkpoint of ours, half or whole, out of its place, to the `trash-N` that it returns.

    That is removed after the next whole save: what looks half-written may be whole, and a save may fail.
    """
    if not (names := folder.names()) or not ours(names):
        return None
    home = folder.parent
    free = next(name for number in itertools.count(1) if not home.exists(name := f"trash-{number}"))
    folder.move(home / free)
    return free


def expire(folder: Folder) -> None:
    """Removes a whole checkpoint, on a disk by way of `trash-N`: an interruption leaves nothing that no one removes."""
    if folder.remote or make_room(folder) is None:
        remove(folder)
    else:
        empty_trash(folder.parent)


def empty_trash(output: Folder) -> None:
    """Removes what :func:`make_room` moved; whatever can't be removed stays until the next whole save."""
    with contextlib.suppress(StorageError):
        for trash in (output / name for name in output.names() if TRASH.fullmatch(name)):
            if ours(trash.names()):
                remove(trash)


def remove(folder: Folder) -> None:
    """Removes a checkpoint, its manifest first: if that is interrupted, the rest does not look whole."""
    if not folder.is_link:
        folder.remove_file(MANIFEST)
    folder.remove()


def damaged(
    folder: Folder,
    found: str,
    why: str = "a state that is not what was saved must not be trained on",
    instead: str = f"an older checkpoint; {_LATEST}",
) -> UserError:
    return UserError(asked=f"the checkpoint {folder}", found=found, why=why, instead=instead)


def _as_bytes(files: Any, version: Any = None) -> bytes:
    """The manifest's text, which holds a checksum of itself; by default in the format of the files."""
    version = format_of(files) if version is None else version
    own = xxhash.xxh3_64_hexdigest(json.dumps([version, files]).encode())
    return json.dumps({"format": version, "files": files, "checksum": own}, indent=1).encode()


def ours(names: Sequence[str]) -> bool:
    """Whether our saves write all these names of files, so that their folder may be removed."""
    known = {MANIFEST, INDEX, METADATA, TOKENIZER, GENERATION, *TEXTS, ADAPTER_CONFIG}
    return all(name in known or name.endswith(TEMPORARY) or TENSORS.fullmatch(name) for name in names)
