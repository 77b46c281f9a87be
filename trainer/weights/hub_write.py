"""Weights out in the hub's format, from any source, a parameter at a time: no devices needed, no model held.

The names and shapes are transformers' own doing: its conversion, run backwards on tensors that are not read yet
(`trainer.weights.lazy`), says what the files will hold. The sizes being known, a file's header is written first and its tensors
follow as they are read.

safetensors (https://github.com/huggingface/safetensors#format): 8 bytes, the header's length N (unsigned, little
endian); N bytes of JSON, name -> dtype, shape, [begin, end) in what follows, padded with spaces; then the tensors,
little endian, row-major, with no gap between them.

Upstream, semi-private, pinned with transformers: `core_model_loading.revert_weight_conversion`.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.core_model_loading import revert_weight_conversion

from trainer.arrays import Slices
from trainer.errors import UserError
from trainer.report.bars import byte_bar
from trainer.storage import Folder
from trainer.weights.hub_read import DTYPES, INDEX, WEIGHTS
from trainer.weights.lazy import Lazy
from trainer.weights.sources import Source

KEY_FORMATS = ("original", "new")
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def export(
    folder: Folder | str | Path,
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    key_format: str = "original",
    max_shard_size: str = "5GB",
    dtype: torch.dtype | None = None,
    console: Console | None = None,
) -> None:
    """Write a folder that `from_pretrained` loads: safetensors, config, generation config, tokenizer.

    Every file is whole or not there; what makes the folder a checkpoint (the one file of weights, or the index of
    several) comes last. Weights that lay there are replaced.

    Args:
        folder: on disk, or in an object store.
        model: the plain (unstacked) model on meta, whose class knows the hub's names.
        source: the model's own parameter or buffer name -> values.
        key_format: ``original``: names and shapes as the family's checkpoints on the hub have them, which is what
            `save_pretrained` writes of a model that it did not load; ``new``: as transformers 5 has them in memory.
        max_shard_size: of a file, such as ``5GB``; a single tensor may be larger.
        dtype: what floating-point tensors are written in; default: as the source has them.

    Raises:
        UserError: no space left, a folder that can't be written, or a size that is none.
    """
    folder = folder if isinstance(folder, Folder) else Folder(str(folder))
    if key_format not in KEY_FORMATS:
        raise UserError(
            asked=f"key format {key_format!r}",
            found="it is none of the known ones",
            why="names in a checkpoint follow one of two conventions",
            instead="original (as on the hub) or new (as transformers 5 has them in memory)",
        )
    tensors = hub_tensors(model, source, key_format)
    dtypes = {name: _stored(lazy.dtype, dtype) for name, lazy in tensors.items()}
    files = _split(tensors, dtypes, max_shard_size)
    total = sum(lazy.like.numel() * dtypes[name].itemsize for name, lazy in tensors.items())
    before = [name for name in folder.names() if _is_weights(name)]
    with byte_bar(console or Console(quiet=True), "writing weights", total) as advance:
        _write_description(folder, model, tokenizer, next(iter(dtypes.values())))
        if WEIGHTS not in files and INDEX in before:
            folder.remove_file(INDEX)  # it would vouch for old files and new ones together
        _write_files(folder, files, tensors, dtypes, advance)
    if WEIGHTS not in files:
        index = {
            "metadata": {"total_size": total},
            "weight_map": {name: file for file, names in files.items() for name in names},
        }
        folder.write(INDEX, json.dumps(index, indent=2).encode())
    for name in before:
        if name not in files and (name != INDEX or WEIGHTS in files):
            folder.remove_file(name)


def hub_tensors(model: PreTrainedModel, source: Source, key_format: str) -> dict[str, Lazy]:
    """What a checkpoint of ``model`` holds, by the hub's names; nothing is read yet."""
    tied = getattr(model, "all_tied_weights_keys", {})
    twins: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        twins.setdefault(id(parameter), []).append(name)
    # of a tied parameter's names the one that is written, once, is that which the others are tied to
    written = {next((name for name in group if name not in tied), group[0]): group[0] for group in twins.values()}
    parameters = {name for group in twins.values() for name in group}
    written |= {name: name for name in model.state_dict() if name not in parameters}  # buffers
    ignored = set(model._keys_to_ignore_on_save or ())
    last = _Last(source)
    tensors = {name: Lazy.of(_Whole(last, known)) for name, known in written.items() if name not in ignored}
    # it takes tensors, and what torch's functions take for one
    return revert_weight_conversion(model, tensors) if key_format == "original" else tensors  # type: ignore[arg-type, return-value]


class _Last:
    """Keeps the parameter that was read last: the hub's tensors that it is cut into are written one after the other."""

    def __init__(self, source: Source) -> None:
        self.source, self.name = source, ""

    def read(self, name: str) -> torch.Tensor:
        if name != self.name:
            self.name, self.values = "", torch.empty(0)  # let go of the last one first
            array = self.source(name)
            self.values = array[tuple(slice(0, size) for size in array.shape)]
            self.name = name
        return self.values


class _Whole:
    """A parameter as an array that is read whole, and once."""

    def __init__(self, last: _Last, name: str) -> None:
        self.last, self.name, array = last, name, last.source(name)
        self.shape, self.dtype = tuple(array.shape), array.dtype

    def __getitem__(self, where: Slices) -> torch.Tensor:
        return self.last.read(self.name)[where]


def _stored(dtype: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and dtype.is_floating_point else dtype


def _split(tensors: Mapping[str, Lazy], dtypes: Mapping[str, torch.dtype], max_shard_size: str) -> dict[str, list[str]]:
    """File -> the tensors in it, in their order."""
    sizes = {name: lazy.like.numel() * dtypes[name].itemsize for name, lazy in tensors.items()}
    try:
        split = split_state_dict_into_shards_factory(
            sizes,
            get_storage_size=lambda size: size,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
    except ValueError as error:
        raise UserError(
            asked=f"--max_shard_size {max_shard_size}",
            found=str(error),
            why="it is the size of a file",
            instead="--max_shard_size 5GB",
        ) from error
    # wide dtypes first, so that each tensor lies at a multiple of its own width
    return {
        file: sorted(names, key=lambda name: -dtypes[name].itemsize)
        for file, names in split.filename_to_tensors.items()
    }


def _write_files(
    folder: Folder,
    files: Mapping[str, list[str]],
    tensors: dict[str, Lazy],
    dtypes: Mapping[str, torch.dtype],
    advance: Callable[[int], None],
) -> None:
    """Write the files one after the other; if that fails, those that were written are removed again."""
    written: list[str] = []
    try:
        for file, names in files.items():
            with _whole(folder, file) as out:
                out.write(_header({name: (tuple(tensors[name].shape), dtypes[name]) for name in names}))
                for name in names:
                    values = tensors.pop(name).read().to(dtypes[name]).contiguous()
                    out.write(values.reshape(-1).view(torch.uint8).numpy().data)
                    advance(values.nbytes)
                    del values  # before the next is read
            written.append(file)
    except BaseException:
        for file in written:
            with contextlib.suppress(UserError):
                folder.remove_file(file)
        raise


def _header(tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype) in tensors.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


@contextlib.contextmanager
def _whole(folder: Folder, name: str) -> Iterator[IO[bytes]]:
    """A file to write, which appears under its name when it is whole."""
    if folder.remote:  # an object appears when its upload ends
        with folder.open(name, "wb") as file:
            yield file
        return
    temporary = f".{name}.tmp"
    with folder.open(temporary, "wb") as file:
        yield file
    os.replace(Path(str(folder)) / temporary, Path(str(folder)) / name)


def _write_description(
    folder: Folder, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None, dtype: torch.dtype
) -> None:
    """The small files; transformers writes them to disk alone, so they go by way of it."""
    model.config.dtype = dtype
    model.config.architectures = [type(model).__name__]
    with tempfile.TemporaryDirectory() as scratch:
        model.config.save_pretrained(scratch)
        if model.can_generate():
            # not save_pretrained, which refuses some that are on the hub
            _generation_config(model).to_json_file(Path(scratch) / "generation_config.json")
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
        for path in sorted(Path(scratch).rglob("*")):
            if path.is_file():
                place = path.relative_to(scratch).parent
                (folder / str(place) if place.name else folder).write(path.name, path.read_bytes())


def _generation_config(model: PreTrainedModel) -> GenerationConfig:
    """That of the checkpoint which the config came from, if it has one, else the family's."""
    if model.config.name_or_path:
        with contextlib.suppress(OSError, ValueError):
            return GenerationConfig.from_pretrained(model.config.name_or_path, local_files_only=True)
    return model.generation_config  # type: ignore[return-value]


def _is_weights(name: str) -> bool:
    return name in (WEIGHTS, INDEX) or (name.startswith("model-") and name.endswith(".safetensors"))
