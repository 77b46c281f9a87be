"""A checkpoint in the hub's format as a Source: safetensors files, mapped into memory, under the model's own names.

Nothing is read when it is opened but headers, and that is when everything wrong with it is said. Then each parameter is
an array: a slice of it reads the slices of the files that it is made of, through transformers' own conversion mapping,
so checkpoints of older layouts load as well.

Upstream, semi-private, pinned with transformers: `rename_source_key`, `WeightConverter` and `WeightRenaming` of
`core_model_loading`, `conversion_mapping.get_model_conversion_mapping`,
`PreTrainedModel._adjust_missing_and_unexpected_keys`.
"""

from __future__ import annotations

import copy
import json
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub import snapshot_download
from rich.console import Console
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from trainer.arrays import Array, Slices
from trainer.errors import UserError
from trainer.report.bars import byte_bar
from trainer.weights.lazy import Lazy, Values

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


# of a repository only what is read: some hold the weights a second time in a format of their own
PATTERNS = ["model.safetensors", "model-*.safetensors", INDEX, "config.json", "generation_config.json"]
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
# names of dtypes in a safetensors header
DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
}


LISTED = 8


@dataclass
class Group:
    """Tensors of the files that are converted together, by one of transformers' transforms."""

    transform: WeightConverter | WeightRenaming
    members: list[tuple[str, str]] = field(default_factory=list)  # (source pattern, the file's tensor)


class HubWeights:
    """The weights of a hub checkpoint: (the model's own parameter or buffer name) -> array.

    Args:
        asked: what the user named, for messages.
        files: of safetensors, all of them.
        model: transformers' own, on meta; its class knows how the hub names what it holds.

    Raises:
        UserError: a file is truncated or corrupt; tensors are missing, left over or of another shape than the config
            says; tied parameters that differ.
    """

    def __init__(self, asked: str, files: Sequence[Path], model: PreTrainedModel) -> None:
        self.asked, self.model = asked, model
        self.bytes_read = 0  # of the files; what is asked for twice counts twice
        self.watch: Callable[[int], None] = lambda count: None
        self.tensors = {name: tensor for file in files for name, tensor in _open(asked, file, self._count).items()}
        self.groups = self._match()
        self.twins = _twins(model)
        shapes = {name: (tuple(lazy.shape), group) for group, name, lazy in self._converted(self.groups)}
        self.of = {name: group for name, (_, group) in shapes.items()}
        self._check({name: shape for name, (shape, _) in shapes.items()})
        self._check_tied()

    @property
    def total_bytes(self) -> int:
        """Of all tensors that the model takes."""
        members = (tensor for group in self.groups.values() for _, tensor in group.members)
        return sum(self.tensors[name].bytes for name in members)

    def __call__(self, name: str) -> Array:
        """The values of a parameter or buffer; nothing is read yet."""
        for twin in (name, *self.twins.get(name, ())):
            if twin in self.of:
                return Values(self._convert(twin, self.of[twin])[twin])
        return self.model.get_buffer(name)  # one that no file need hold: the class says what it is

    def _count(self, count: int) -> None:
        self.bytes_read += count
        self.watch(count)

    def _match(self) -> dict[str, Group]:
        """The files' tensors by what they become; what becomes nothing is under its own name."""
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        groups: dict[str, Group] = {}
        for tensor in sorted(self.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
            if name not in state and tensor in state:  # it had the model's own name already
                name, pattern = rename_source_key(tensor, [], [], prefix, state)
            if pattern is None:
                groups.setdefault(name, Group(WeightRenaming(tensor, name))).members.append((tensor, tensor))
            else:
                groups.setdefault(name, Group(by_pattern[pattern])).members.append((pattern, tensor))
        return groups

    def _converted(self, groups: Mapping[str, Group]) -> Iterator[tuple[Group, str, Lazy]]:
        for first, group in groups.items():
            for name, lazy in self._convert(first, group).items():
                yield group, name, lazy

    def _convert(self, name: str, group: Group) -> dict[str, Lazy]:
        """What the group becomes; ``name`` is one of them."""
        transform = copy.deepcopy(group.transform)  # it collects
        for pattern, tensor in group.members:
            lazy: Any = Lazy.of(self.tensors[tensor])  # taken for a tensor by whatever torch function it meets
            transform.add_tensor(name, tensor, pattern, lazy)
        try:
            found = transform.convert(name, model=self.model, config=self.model.config)
        except Exception as error:  # torch's and transformers' own, of shapes that do not go together
            tensors = [tensor for _, tensor in group.members]
            raise UserError(
                asked=f"--model {self.asked}",
                found=f"{len(tensors)} tensors that make {name} do not go together: {listed(tensors)} ({error})",
                why="transformers' conversion of them fails",
                instead="a complete checkpoint, with the config.json that it was saved with",
            ) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}

    def _check(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Every parameter has values of its shape, and no tensor is left over."""
        state = self.model.state_dict()
        keys = SimpleNamespace(missing_keys=set(state) - set(shapes), unexpected_keys=set(shapes) - set(state))
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        absent = {name for name in keys.missing_keys if name in parameters}
        self.model._adjust_missing_and_unexpected_keys(keys)  # type: ignore[arg-type]
        missing = (keys.missing_keys - absent) | {n for n in absent if not shapes.keys() & self.twins.get(n, set())}
        extra = keys.unexpected_keys
        wrong = [
            f"{name} {list(shapes[name])} where the config says {list(state[name].shape)}"
            for name in shapes.keys() & state.keys()
            if shapes[name] != tuple(state[name].shape)
        ]
        kinds = (("missing", missing), ("left over", extra), ("of another shape", wrong))
        found = [f"{len(names)} {kind}: {listed(names)}" for kind, names in kinds if names]
        if found:
            raise UserError(
                asked=f"--model {self.asked}",
                found="tensors " + "; tensors ".join(found),
                why=f"they do not fit its config (a {type(self.model).__name__}): training would start from other "
                "weights than these without a word",
                instead="the config.json that the weights were saved with, and all of the files",
            )

    def _check_tied(self) -> None:
        """Where the files hold a tied parameter under several names, they must agree."""
        for name, twins in self.twins.items():
            for twin in sorted(twins & self.of.keys()):
                if name < twin and name in self.of and not _equal(self(name), self(twin)):
                    raise UserError(
                        asked=f"--model {self.asked}",
                        found=f"{name} and {twin} differ in its files",
                        why="its config ties them (tie_word_embeddings), so one of the two would be lost",
                        instead='"tie_word_embeddings": false in its config.json',
                    )


@dataclass(frozen=True)
class FileTensor:
    """A tensor of a safetensors file, mapped into memory: what is read of it is what is paged in."""

    view: torch.Tensor
    count: Callable[[int], None]

    @property
    def shape(self) -> torch.Size:
        return self.view.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.view.dtype

    @property
    def bytes(self) -> int:
        return self.view.nbytes

    def __getitem__(self, where: Slices) -> torch.Tensor:
        part = self.view[where]
        self.count(part.nbytes)
        return part


def open_checkpoint(name: str, model: PreTrainedModel) -> HubWeights:
    """The checkpoint ``name`` (a folder, or a hub id, fetched into the hub's cache) of ``model``, which is on meta.

    Raises:
        UserError: no such checkpoint, pickled or quantized weights, or what :class:`HubWeights` refuses.
    """
    if getattr(model.config, "quantization_config", None):
        raise UserError(
            asked=f"--model {name}",
            found="its config.json has a quantization_config",
            why="quantized weights are not trained, and are dequantized by each method's own library",
            instead="the checkpoint in bfloat16 or float32",
        )
    folder = Path(name) if Path(name).is_dir() else _fetched(name)
    return HubWeights(name, _files(name, folder), model)


@contextmanager
def reading(checkpoint: HubWeights, console: Console) -> Iterator[None]:
    """A bar of bytes and bytes/s on a terminal while ``checkpoint`` is read."""
    with byte_bar(console, "reading weights", checkpoint.total_bytes) as advance:
        checkpoint.watch = advance
        try:
            yield
        finally:
            checkpoint.watch = lambda count: None


def listed(names: Iterable[str]) -> str:
    """The first eight, and how many more."""
    names = sorted(names, key=dot_natural_key)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _fetched(name: str) -> Path:
    try:
        return Path(snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the hub client raises many kinds
        raise UserError(
            asked=f"--model {name}",
            found=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            why="there is no such folder here, and the hub did not give its weights",
            instead="a folder with model.safetensors; or a hub id with network (HF_TOKEN for a gated model), "
            "or whose files are in the hub's cache",
        ) from error


def _files(name: str, folder: Path) -> list[Path]:
    """The weight files that ``folder`` consists of: as transformers looks for them."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    there = sorted(path.name for path in folder.iterdir())
    if INDEX not in there:
        pickled = [file for file in there if Path(file).suffix in PICKLES]
        other = [file for file in there if file.endswith(".safetensors")]
        raise UserError(
            asked=f"--model {name}",
            found=f"neither {WEIGHTS} nor {INDEX} in {folder}"
            + (f", but pickled weights: {listed(pickled)}" if pickled else "")
            + (f", but {listed(other)}" if other else ""),
            why="a pickle runs whatever code was put into it when it is opened, so only safetensors are read"
            if pickled or not other
            else "only the index says whether these are all of the files",
            instead="the hub's safetensors revision; or, if you trust the files, convert them once: "
            f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(FOLDER)",
        )
    try:
        names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise _unreadable(name, folder / INDEX, error) from error
    absent = [file for file in names if not (folder / file).is_file()]
    if absent:
        raise UserError(
            asked=f"--model {name}",
            found=f"{INDEX} names {len(absent)} files of {len(names)} that are not there: {listed(absent)}",
            why="the weights in them would be missing",
            instead=f"all of the files in {folder}",
        )
    return [folder / file for file in names]


def _open(asked: str, file: Path, count: Callable[[int], None]) -> dict[str, FileTensor]:
    """The tensors of a file; they keep it mapped."""
    try:
        with safe_open(file, framework="pt") as opened:
            # views of the mapping: only what is read of them is paged in
            return {name: FileTensor(opened.get_tensor(name), count) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise _unreadable(asked, file, error) from error


def _unreadable(asked: str, file: Path, error: Exception) -> UserError:
    return UserError(
        asked=f"--model {asked}",
        found=f"{file} ({os.path.getsize(file) if file.exists() else 0:,} bytes): {type(error).__name__}: {error}",
        why="the file is truncated or corrupt, or a git-lfs pointer in the place of one",
        instead=f"download {file.name} again",
    )


def _twins(model: nn.Module) -> dict[str, set[str]]:
    """A tied parameter's name -> its other names."""
    by_parameter: dict[int, set[str]] = defaultdict(set)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        by_parameter[id(parameter)].add(name)
    return {name: names - {name} for names in by_parameter.values() if len(names) > 1 for name in names}


def _equal(one: Array, other: Array, rows: int = 4096) -> bool:
    """Whether two arrays hold the same, a few rows at a time."""
    rest = [slice(0, size) for size in one.shape[1:]]
    parts: Iterable[Any] = (slice(i, min(i + rows, one.shape[0])) for i in range(0, one.shape[0], rows))
    return all(torch.equal(one[(part, *rest)], other[(part, *rest)]) for part in parts)
