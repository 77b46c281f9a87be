"""A source of weights in the hub's format: safetensors files, mapped into memory, under the model's own names.

Opening reads and checks the files' headers alone. Reading a slice of a parameter reads only its slices of the files.
transformers' own conversion mapping tells which those are, so checkpoints of older formats load as well.
"""

import copy
import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import torch
from huggingface_hub import snapshot_download
from rich.console import Console
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

# semi-private: transformers/conversion_mapping.py and transformers/core_model_loading.py, transformers 5.23
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

from shardwright.errors import UserError
from shardwright.files.arrays import Array, LazyArray, Slices
from shardwright.files.safetensors_file import DTYPES, LARGEST, read_header
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights import gguf_file
from shardwright.weights.formats.format import DEQUANTIZED
from shardwright.weights.formats.published import FormatError, Published, plain, quantization_settings
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.mtp import is_mtp
from shardwright.weights.torch_file import is_state_dict, open_torch

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TORCH_WEIGHTS, TORCH_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
# files to fetch: some repositories hold the weights a second time, in another format
PATTERNS = ["model.safetensors", "model-*.safetensors", INDEX, "*config.json"]
LISTED = 8  # names in a message
_PLAIN = "the checkpoint in bfloat16 or float32"
_FLOATING = {dtype for dtype in DTYPES.values() if dtype.is_floating_point}


@dataclass
class Group:
    """Tensors that one of transformers' transforms converts together."""

    transform: WeightConverter | WeightRenaming
    members: list[tuple[str, str]] = field(default_factory=list)  # (source pattern, tensor's name in the files)


class HubWeights:
    """A source of the weights in safetensors ``files``, which the user ``asked`` for by this name.

    ``model`` is transformers' own, on meta; its class knows the hub's names. Raises UserError if a file is truncated or
    corrupt; tensors are missing, left over, or of another shape than the config says; or tied parameters differ.
    """

    def __init__(self, asked: str, files: Sequence[Path], model: PreTrainedModel) -> None:
        self.asked, self.model = asked, model
        self.watch: Callable[[int], None] = lambda count: None  # told the bytes of each read
        self.formats: Counter[str] = Counter()  # titles of quantized formats -> tensors in them
        opened = {file: self._open(file) for file in files}
        self.files = {name: file for file, tensors in opened.items() for name in tensors}
        self.published = self._dequantized({name: t for tensors in opened.values() for name, t in tensors.items()})
        self.tensors = self.published.tensors
        self.formats.update(weight.form.title for weight in self.published.packed.values())
        self.groups = self._match()
        self.untrained = self._set_aside()  # by the files' names: what they hold, and the model goes without
        self.tied = {name: set(names) for names in parameter_names(model) for name in names}
        self.group_of: dict[str, Group] = {}
        found: dict[str, torch.Tensor] = {}  # on meta
        for first, group in self.groups.items():
            for name, lazy in self._convert(first, group).items():
                found[name], self.group_of[name] = lazy.like, group
        self._check(found)
        self._check_tied()

    @property
    def total_bytes(self) -> int:
        """The bytes of the model's tensors in the files."""
        names = [name for name in self.tensors if name not in self.untrained]
        read = [tensor for name in names for tensor in self.published.stored(name)]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in read)

    @property
    def said(self) -> str:
        """The quantized formats, for a run's first lines: "MXFP4 (48 tensors), dequantized to bfloat16", or ""."""
        listed = ", ".join(f"{title} ({count:,} tensors)" for title, count in self.formats.items())
        return listed and f"{listed}, dequantized to {str(DEQUANTIZED).removeprefix('torch.')}"

    def __call__(self, name: str) -> Array:
        """Returns a parameter or buffer as an array; nothing is read yet."""
        for twin in (name, *self.tied.get(name, ())):
            if twin in self.group_of:
                lazy = self._convert(twin, self.group_of[twin])[twin]
                return LazyArray(tuple(lazy.shape), lazy.dtype, lazy.read)
        return self.model.get_buffer(name)  # no file need hold it: the model's class has computed it

    def _open(self, file: Path) -> dict[str, LazyArray]:
        """Name -> tensor of a file, which stays mapped as long as they live."""

        def read(view: torch.Tensor, where: Slices) -> torch.Tensor:
            part = view[where]
            self.watch(part.nbytes)
            return part

        try:
            if file.suffix == gguf_file.SUFFIX:
                arrays, counts = gguf_file.open_gguf(file, self.model, lambda count: self.watch(count))
                self.formats.update(counts)
                return arrays
            views = open_torch(file) if is_state_dict(file.name) else _open_safetensors(file)
            return {name: LazyArray(tuple(view.shape), view.dtype, partial(read, view)) for name, view in views.items()}
        except UserError:
            raise
        except Exception as error:  # safetensors', gguf's, unpickling's, and torch's for shapes that it can't hold
            raise _unreadable(self.asked, file, error) from error

    def _dequantized(self, tensors: Mapping[str, Array]) -> Published:
        """The files' tensors as plain weights; raises UserError where they are quantized and can't be read."""
        settings = quantization_settings(self.model.config)
        try:
            return plain(tensors, settings)
        except FormatError as error:
            files = first_names({self.files[tensor].name for tensor in error.tensors if tensor in self.files})
            why = "quantized weights are read with the tensors that say what their codes stand for"
            instead = f"all of the files, as they were published; or {_PLAIN}"
            raise _refused(self.asked, f"{error} (in {files})", why, instead) from error

    def _match(self) -> dict[str, Group]:
        """Groups the files' tensors by the first parameter that they become; one that becomes none is left over."""
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        groups: dict[str, Group] = {}
        for tensor in sorted(self.tensors, key=dot_natural_key):
            name, pattern = rename_source_key(tensor, renamings, converters, prefix, state)
            if name not in state and tensor in state:  # it has the model's own name already
                name, pattern = rename_source_key(tensor, [], [], prefix, state)
            transform = WeightRenaming(tensor, name) if pattern is None else by_pattern[pattern]
            groups.setdefault(name, Group(transform)).members.append((pattern or tensor, tensor))
        return groups

    def _set_aside(self) -> dict[str, LazyArray]:
        """Takes the groups out that no parameter needs and none misses: MTP layers, what its family says to ignore."""
        other = self.groups.keys() - self.model.state_dict().keys()
        ignored = other - self._adjusted(set(), other)[1]
        ignored |= {name for name in other if is_mtp(name, self.model.config)}
        return {
            tensor: self.tensors[tensor]
            for name in sorted(ignored, key=dot_natural_key)
            for _, tensor in self.groups.pop(name).members
        }

    def _adjusted(self, missing: Set[str], unexpected: Set[str]) -> tuple[Set[str], Set[str]]:
        """Both without the names that the model's family says to ignore."""
        keys = SimpleNamespace(missing_keys=set(missing), unexpected_keys=set(unexpected))
        # semi-private: transformers/modeling_utils.py, transformers 5.23
        self.model._adjust_missing_and_unexpected_keys(keys)  # type: ignore[arg-type]
        return keys.missing_keys, keys.unexpected_keys

    def _convert(self, name: str, group: Group) -> dict[str, Lazy]:
        """Name -> values of all parameters, ``name`` among them, that a group becomes; else raises UserError."""
        transform = copy.deepcopy(group.transform)  # which keeps the tensors that are added to it
        for pattern, tensor in group.members:
            lazy: Any = Lazy.of(self.tensors[tensor])  # torch's functions take it for a tensor
            transform.add_tensor(name, tensor, pattern, lazy)
        try:
            found = transform.convert(name, model=self.model, config=self.model.config)
        except Exception as error:  # of torch's and of transformers' kinds
            tensors = [tensor for _, tensor in group.members]
            text = f"{len(tensors)} tensors that make {name} do not go together: {first_names(tensors)} ({error})"
            instead = "a complete checkpoint, with the config.json that it was saved with"
            raise _refused(self.asked, text, "transformers' conversion of them fails", instead) from error
        return {key: value[0] if isinstance(value, list) else value for key, value in found.items()}

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises UserError unless every parameter has values of its shape and kind and no tensor is left over."""
        state = self.model.state_dict()
        absent = (state.keys() - found.keys()) & self.tied.keys()
        missing, unexpected = self._adjusted(state.keys() - found.keys(), found.keys() - state.keys())
        missing = (missing - absent) | {n for n in absent if not found.keys() & self.tied[n]}
        shapes = {name: (list(found[name].shape), list(state[name].shape)) for name in found.keys() & state.keys()}
        misshapen = [
            f"{n} {ours} where the config says {theirs}" for n, (ours, theirs) in shapes.items() if ours != theirs
        ]
        kinds = (("missing", missing), ("left over", unexpected), ("of another shape", misshapen))
        wrong = [f"{len(names)} {kind}: {first_names(names)}" for kind, names in kinds if names]
        if wrong:
            fit = f"they do not fit its config (a {type(self.model).__name__})"
            why = f"{fit}: training would start from other weights than these without a word"
            instead = "the config.json that the weights were saved with, and all of the files"
            settings = quantization_settings(self.model.config)
            if unexpected and settings:
                method = settings.get("quant_method") or settings.get("quant_algo")
                why += f"; config.json says that they are quantized ({method}), in a way that is not read"
                instead += f"; or {_PLAIN}"
            raise _refused(self.asked, "tensors " + "; tensors ".join(wrong), why, instead)
        floating = {name: found[name].dtype for name in shapes if state[name].is_floating_point()}
        other = [f"{name} in {dtype}" for name, dtype in floating.items() if dtype not in _FLOATING]
        if other:
            text = f"{len(other)} tensors of no floating-point numbers: {first_names(other)}"
            why = "they are quantized, or of another kind: taken as they stand they would be other weights"
            raise _refused(self.asked, text, why, _PLAIN)

    def _check_tied(self) -> None:
        """Raises UserError where the files hold a tied parameter under two names, with different values."""
        for names in parameter_names(self.model):
            held = sorted(self.group_of.keys() & set(names))
            for twin in held[1:]:
                if not _equal(self(held[0]), self(twin)):
                    why = "its config ties them (tie_word_embeddings), so one of the two would be lost"
                    instead = '"tie_word_embeddings": false in its config.json'
                    raise _refused(self.asked, f"{held[0]} and {twin} differ in its files", why, instead)


def open_hub_weights(name: str, model: PreTrainedModel) -> HubWeights:
    """Opens the weights of ``model`` (on meta) in the folder ``name``, or fetches those of that hub id.

    Raises UserError if there are none, they are pickled, or :class:`HubWeights` refuses them.
    """
    try:
        folder = Path(name if os.path.exists(name) else snapshot_download(name, allow_patterns=PATTERNS))
    except Exception as error:  # the hub client raises many kinds
        raise _refused(
            name,
            f"{type(error).__name__}: {' '.join(str(error).split())[:300]}",
            "there is no such folder here, and the hub did not give its weights",
            "a folder with model.safetensors; or a hub id with network (HF_TOKEN for a gated model), "
            "or whose files are in the hub's cache",
        ) from error
    return HubWeights(name, _files(name, folder), model)


def reopen_hub_weights(name: str, model: PreTrainedModel, console: Console) -> HubWeights | None:
    """The weights that a run started from, for what they hold beside the model; None, and a word, if they are gone."""
    try:
        return open_hub_weights(name, model)
    except UserError as error:
        say(
            console,
            f"lost:    what {name} held beside the model; an export goes without, as its config says: {error.found}",
        )
        return None


@contextmanager
def reading(weights: HubWeights, console: Console) -> Iterator[None]:
    """Shows inside the ``with`` how many bytes of ``weights`` have been read."""
    with byte_bar(console, "reading weights", weights.total_bytes) as weights.watch:
        yield
    weights.watch = lambda count: None


def first_names(names: Iterable[str]) -> str:
    """The first eight of ``names`` in natural order, and the number of the rest."""
    names = sorted(names, key=dot_natural_key)
    return ", ".join(names[:LISTED]) + (f" and {len(names) - LISTED} more" if len(names) > LISTED else "")


def _files(name: str, folder: Path) -> list[Path]:
    """The weight files in ``folder``: a GGUF file itself, or the only one, or those of the index.

    As transformers does it takes safetensors files first. Raises UserError if there are none, or not all.
    """
    if folder.suffix == gguf_file.SUFFIX and folder.is_file():
        return [folder]
    there = sorted(path.name for path in folder.iterdir())
    for single, index in ((WEIGHTS, INDEX), (TORCH_WEIGHTS, TORCH_INDEX)):
        if single in there:
            return [folder / single]
        if index in there:
            return _indexed(name, folder, index)
    alone = [file for file in there if is_state_dict(file)]
    if len(alone) == 1:
        return [folder / alone[0]]
    other = [file for file in there if file.endswith((".safetensors", gguf_file.SUFFIX)) or file in alone]
    found, why = f"neither {WEIGHTS} nor {INDEX} in {folder}", "only the index says whether these are all of the files"
    found += f", but {first_names(other or there)}"
    if not other:
        why = "the weights are not there, or not in a format that is read"
    instead = f"a folder with {WEIGHTS}, or with {INDEX} and the files that it names"
    if any(file.endswith(gguf_file.SUFFIX) for file in there):
        instead = f"--model {folder}/FILE.gguf, one of those files"
    raise _refused(name, found, why, instead + "; or --from_scratch, which trains from random weights")


def _indexed(name: str, folder: Path, index: str) -> list[Path]:
    """The files that an index names; raises UserError if it can't be read, or one of them is absent."""
    try:
        with _opened(folder / index) as opened:
            names = sorted(set(json.loads(opened.read(LARGEST))["weight_map"].values()))
        for file in names:
            good = file.endswith(".safetensors") if index == INDEX else is_state_dict(file)
            if not good or not file.isprintable() or set(file) & set("/\\"):
                raise ValueError(f"it names {file[:200]!r}, which is no file of weights beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _unreadable(name, folder / index, error) from error
    absent = [file for file in names if not os.path.isfile(folder / file)]
    if absent:
        found = f"{index} names {len(absent)} files of {len(names)} that are not there: {first_names(absent)}"
        raise _refused(name, found, "the weights in them would be missing", f"all of the files in {folder}")
    return [folder / file for file in names]


def _open_safetensors(file: Path) -> dict[str, torch.Tensor]:
    with _opened(file) as header:
        read_header(lambda start, stop: os.pread(header.fileno(), stop - start, start))
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (mapped, not read)


def _opened(file: Path) -> IO[bytes]:
    if not file.is_file():
        raise OSError("no regular file")  # a pipe may never have a writer
    return file.open("rb")


def _unreadable(asked: str, file: Path, error: Exception) -> UserError:
    size = os.path.getsize(file) if file.exists() else 0
    found = f"{file} ({size:,} bytes): {type(error).__name__}: " + str(error).partition("\n")[0][:400]
    why = "the file is truncated or corrupt, or a git-lfs pointer in the place of one"
    instead = f"download {file.name} again"
    if is_state_dict(file.name):
        why += "; or it holds more than tensors by name, and a pickle could run whatever code was put into it"
        instead += ", or the repository's safetensors; or, if you trust the file, convert it once: "
        instead += f"AutoModelForCausalLM.from_pretrained({asked!r}).save_pretrained(FOLDER)"
    return _refused(asked, found, why, instead)


def _refused(asked: str, found: str, why: str, instead: str) -> UserError:
    return UserError(asked=f"--model {asked}", found=found, why=why, instead=instead)


def parameter_names(model: nn.Module) -> list[list[str]]:
    """The names of each parameter, of which a tied one has several."""
    found: dict[int, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found[id(parameter)].append(name)
    return list(found.values())


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays hold the same values; reads 4096 rows at a time."""
    parts = [(slice(i, i + 4096), *[slice(None)] * (len(one.shape) - 1)) for i in range(0, one.shape[0], 4096)]
    return all(torch.equal(one[part], other[part]) for part in parts)
