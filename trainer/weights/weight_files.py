"""The files that hold a checkpoint's weights: which of a folder or a repository these are, and how each is opened."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import IO

from safetensors import safe_open

from shardwright.errors import UserError, command
from shardwright.files.arrays import Array, LazyArray
from shardwright.files.hub_names import ADAPTER_CONFIG, ADAPTERS_MODEL
from shardwright.files.safetensors_file import DTYPES, LARGEST, HeaderEntry, read_header
from shardwright.weights.names import first_names
from shardwright.weights.torch_file import is_state_dict, open_torch

# a checkpoint's only file of weights, and the index of several, whatever these are called; safetensors come first
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SAFETENSORS, GGUF = ".safetensors", ".gguf"
_PIECE = 1 << 16  # bytes
NO_INDEX = (ValueError, KeyError, AttributeError, TypeError, RecursionError)  # for what is no index


def chosen_files(there: Collection[str], read: Callable[[str], bytes]) -> list[str] | None:
    """Among the files ``there`` those that hold the weights, and before them the index that names them; None: none.

    Args:
        read: a file of this name -> its bytes. An index that can't be read raises one of :data:`NO_INDEX`.
    """
    for single, index in ((WEIGHTS, INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
        if single in there:
            return [single]
        if index in there:
            return [index, *_indexed(read(index), SAFETENSORS if index == INDEX else None)]
    alone = [file for file in there if is_state_dict(file)]
    return alone if len(alone) == 1 else None


def _indexed(index: bytes, suffix: str | None) -> list[str]:
    """The names of the files in an index of several; raises ValueError for one that is no such file beside it."""
    names = sorted(set(json.loads(index)["weight_map"].values()))
    for file in names:
        kind = file.endswith(suffix) if suffix else is_state_dict(file)
        if not kind or not file.isprintable() or set(file) & set("/\\"):
            raise ValueError(f"it names {file[:200]!r}, which is no {suffix or 'file of weights'} beside it")
    return names


def files_in(name: str, folder: Path) -> list[Path]:
    """The weight files in ``folder``, or the GGUF file that it is; raises UserError if there are none, or not all."""
    if folder.suffix == GGUF and folder.is_file():
        return [folder]
    there = sorted(path.name for path in folder.iterdir())
    index = next((file for file in (INDEX, TORCH_INDEX) if file in there), INDEX)

    def read(file: str) -> bytes:
        with opened(folder / file) as opening:
            return opening.read(LARGEST)

    try:
        names = chosen_files(there, read)
    except (OSError, *NO_INDEX) as error:
        raise unreadable(name, folder / index, error) from error
    if names is None:
        raise no_weights(name, f"in {folder}", there)
    indexed, names = index in names, [file for file in names if file != index]
    absent = [file for file in names if not os.path.isfile(folder / file)]
    if absent:
        found = f"{absent[0]}, which is no file, but a link to one that is gone"
        if indexed:
            found = f"{index} names {len(absent)} files of {len(names)} that are not there: {first_names(absent)}"
        raise refused(name, found, "the weights in them would be missing", f"all of the files in {folder}")
    return [folder / file for file in names]


def no_weights(asked: str, place: str, there: Collection[str]) -> UserError:
    """The refusal of a folder or a repository whose files ``there`` hold no weights, or perhaps not all of them."""
    weights = [file for file in there if file.endswith((SAFETENSORS, GGUF)) or is_state_dict(file)]
    why = "only the index says whether these are all of the files"
    if not weights:
        why = "the weights are not there, or not in a format that is read"
    instead = f"one with {WEIGHTS}, or with {INDEX} and the files that it names"
    if ADAPTER_CONFIG in there:
        why, instead = "they may be an adapter's, which is trained beside a model", ADAPTERS_MODEL
    if {"manifest.json", "tensors.json"} <= {*there}:
        merge = " --merge" if ADAPTER_CONFIG in there else ""
        why = (
            "a run's checkpoint holds the state that its run goes on from (--resume_from_checkpoint), device by device"
        )
        instead = f"the folder that `{command('export')} --checkpoint {asked} --output FOLDER{merge}` writes"
    if any(file.endswith(GGUF) for file in there):
        instead += "; or one of its GGUF files, on this machine: --model FOLDER/FILE.gguf"
    found = f"neither {WEIGHTS} nor {INDEX} {place}, but {first_names(weights or there)}"
    return refused(asked, found, why, f"{instead}; or --from_scratch, which trains from random weights")


def open_file(file: Path) -> Mapping[str, Array]:
    """Name -> tensor of a safetensors file or a state dict, which stays mapped as long as they live.

    Raises errors of many types where it is none.
    """
    if is_state_dict(file.name):
        return open_torch(file)
    with opened(file) as header:  # safetensors' own reader takes the last of two tensors of one name
        entries = read_header(lambda start, stop: os.pread(header.fileno(), stop - start, start))
    mapping = safe_open(file, framework="pt")

    def tensor(name: str, entry: HeaderEntry) -> LazyArray:
        # got when it is read: safetensors 0.8 looks at a tensor's first byte, and repositories have 200,000 tensors
        return LazyArray(entry.shape, DTYPES[entry.dtype], lambda where: mapping.get_tensor(name)[where])

    return {name: tensor(name, entries[name]) for name in sorted(entries)}


def mark_of(files: Iterable[Path]) -> str:
    """A short hash of the files' sizes and of four pieces of each, by which files of other values are known."""
    found = hashlib.sha256()
    for file in files:
        with opened(file) as opening:
            size = os.fstat(opening.fileno()).st_size
            pieces = [os.pread(opening.fileno(), _PIECE, size * eighth // 8) for eighth in (1, 3, 5, 7)]
        found.update(b"".join([str(size).encode(), *pieces]))
    return found.hexdigest()[:16]


def opened(file: Path) -> IO[bytes]:
    if not file.is_file():
        raise OSError("no regular file")  # a pipe may never have a writer
    return file.open("rb")


def unreadable(asked: str, file: Path, error: Exception) -> UserError:
    """The refusal of a file whose opening ended in ``error``."""
    size = os.path.getsize(file) if file.exists() else 0
    found = f"{file} ({size:,} bytes): {type(error).__name__}: " + _plain(error)
    if isinstance(error, MemoryError) or "Cannot allocate memory" in str(error):
        why = "a file is mapped whole, though never read whole, and the kernel grants no mapping as large as this one"
        files = 'files of 5 GB, which save_pretrained(FOLDER, max_shard_size="5GB") writes on a larger machine'
        return refused(asked, found, why, f"a host with more memory; no `ulimit -v`, if one is set; or {files}")
    why = "the file is truncated or corrupt, or a git-lfs pointer in the place of one"
    instead = f"download {file.name} again"
    if is_state_dict(file.name):
        why += "; or it holds more than tensors by name, and a pickle could run whatever code was put into it"
        instead += ", or the repository's safetensors; or, if you trust the file, keep its tensors alone: torch.save({"
        instead += f"n: t for n, t in torch.load({str(file)!r}, weights_only=False).items() if torch.is_tensor(t)}}, "
        instead += f"{str(file)!r})"
    return refused(asked, found, why, instead)


def _plain(error: Exception) -> str:
    """An error's first line, without the colours that torch writes into it."""
    return re.sub(r"\x1b\[[\d;]*m", "", str(error)).partition("\n")[0][:400]


def refused(asked: str, found: str, why: str, instead: str) -> UserError:
    return UserError(asked=f"--model {asked}", found=found, why=why, instead=instead)
