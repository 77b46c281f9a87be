"""A source of weights in the hub's format: safetensors files, mapped into memory, under the model's own names.

Opening reads and checks the files' headers alone. Reading a slice of a parameter reads only its slices of the files.
transformers' own conversion mapping tells which those are, so checkpoints of older formats load as well.
"""

import copy
import json
import math
import os
from collections import defaultdict
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
from shardwright.files.safetensors_file import DTYPES
from shardwright.models.layers import mtp
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights.formats.published import Published, plain, quantization_settings
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.mtp import is_mtp

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# files to fetch: some repositories hold the weights a second time, in another format
PATTERNS = ["model.safetensors", "model-*.safetensors", INDEX, "*config.json"]
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}
LARGEST = 100_000_000  # bytes of an index or a header: safetensors' own limit
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
        self.asked, self.model, self.mtp = asked, model, mtp.layer_names(model)
        self.watch: Callable[[int], None] = lambda count: None  # told the bytes of each read
        self.published = self._dequantized({name: t for file in files for name, t in self._open(file).items()})
        self.tensors = self.published.tensors
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
        names = [name for group in self.groups.values() for _, name in group.members]
        read = [tensor for name in names for tensor in self.published.stored(name)]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in read)

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
            _check_header(file)
            with safe_open(file, framework="pt") as opened:
                views = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (mapped, not read)
            return {name: LazyArray(tuple(view.shape), view.dtype, partial(read, view)) for name, view in views.items()}
        except Exception as error:  # safetensors', and torch's for shapes that it can't hold
            raise _unreadable(self.asked, file, error) from error

    def _dequantized(self, tensors: Mapping[str, Array]) -> Published:
        """The files' tensors as plain weights; raises UserError where they are quantized and can't be read."""
        settings = quantization_settings(self.model.config)
        try:
            return plain(tensors, settings)
        except ValueError as error:
            why = "quantized weights are read with the tensors that say what their codes stand for"
            instead = "all of the files, as they were published; or the checkpoint in bfloat16 or float32"
            raise _refused(self.asked, str(error), why, instead) from error

    def _match(self) -> dict[str, Group]:
        """Groups the files' tensors by the first parameter that they become; one that becomes none is left over."""
        mapping = get_model_conversion_mapping(self.model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix, state = self.model.base_model_prefix, self.model.state_dict()
        groups: dict[str, Group] = {}
        for tensor in sorted(self.tensors, key=dot_natural_key):
            key = mtp.own_name(tensor, self.mtp, self.model.config)
            name, pattern = rename_source_key(key, renamings, converters, prefix, state)
            if name not in state and key in state:  # it has the model's own name already
                name, pattern = rename_source_key(key, [], [], prefix, state)
            transform = WeightRenaming(key, name) if pattern is None else by_pattern[pattern]
            groups.setdefault(name, Group(transform)).members.append((pattern or key, tensor))
        return groups

    def _set_aside(self) -> dict[str, LazyArray]:
        """Takes the groups out that no parameter needs and none misses: MTP layers, what its family says to ignore.

        Of MTP layers that are trained those are copies of other weights, and are not kept.
        """
        other = self.groups.keys() - self.model.state_dict().keys()
        ignored = other - self._adjusted(set(), other)[1]
        ignored |= {name for name in other if is_mtp(name, self.model.config)}
        return {
            tensor: self.tensors[tensor]
            for name in sorted(ignored, key=dot_natural_key)
            for _, tensor in self.groups.pop(name).members
            if not mtp.is_copy(tensor, self.mtp)
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
        further = {name for name in state if name.startswith(tuple(f"{layer}." for layer in self.mtp))}
        if further and further <= missing:
            raise UserError(
                asked=f"--model {self.asked} with --train_mtp",
                found="no MTP layers in its files",
                why="they would be trained from random weights beside a trained model, and nothing said so",
                instead="no --train_mtp; or the hub's own checkpoint (transformers' save_pretrained leaves them out)",
            )
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
        folder = Path(name if os.path.isdir(name) else snapshot_download(name, allow_patterns=PATTERNS))
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
    """The weight files in ``folder``: the only one, or those of the index, as transformers chooses them."""
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    there = sorted(path.name for path in folder.iterdir())
    if INDEX not in there:
        pickled = [file for file in there if Path(file).suffix in PICKLES]
        other = [file for file in there if file.endswith(".safetensors")]
        found = f"neither {WEIGHTS} nor {INDEX} in {folder}"
        why = "only the index says whether these are all of the files"
        if pickled:
            found += f", but pickled weights: {first_names(pickled)}"
        if other:
            found += f", but {first_names(other)}"
        if pickled:
            why = "a pickle runs whatever code was put into it when it is opened, so only safetensors are read"
        elif not other:
            found += f", but {first_names(there)}"
            why = "the weights are not there, or not in the hub's format"
        instead = "the hub's safetensors revision; or, if you trust the files, convert them once: "
        instead += f"AutoModelForCausalLM.from_pretrained({name!r}).save_pretrained(FOLDER); or --from_scratch, which "
        raise _refused(name, found, why, instead + "trains from random weights")
    try:
        with _opened(folder / INDEX) as index:
            names = sorted(set(json.loads(index.read(LARGEST))["weight_map"].values()))
        for file in names:
            if not file.endswith(".safetensors") or not file.isprintable() or set(file) & set("/\\"):
                raise ValueError(f"it names {file[:200]!r}, which is no safetensors file beside it")
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise _unreadable(name, folder / INDEX, error) from error
    absent = [file for file in names if not os.path.isfile(folder / file)]
    if absent:
        found = f"{INDEX} names {len(absent)} files of {len(names)} that are not there: {first_names(absent)}"
        raise _refused(name, found, "the weights in them would be missing", f"all of the files in {folder}")
    return [folder / file for file in names]


def _opened(file: Path) -> IO[bytes]:
    if not file.is_file():
        raise OSError("no regular file")  # a pipe may never have a writer
    return file.open("rb")


def _check_header(file: Path) -> None:
    """Raises ValueError if a safetensors file's header names a tensor twice; its own reader takes the last one."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = next(name for i, (name, _) in enumerate(pairs) if name in dict(pairs[:i]))
            raise ValueError(f"{twice[:200]!r} stands twice in its header")
        return found

    with _opened(file) as opened:
        size = int.from_bytes(opened.read(8), "little")
        json.loads(opened.read(min(size, LARGEST)), object_pairs_hook=unique)


def _unreadable(asked: str, file: Path, error: Exception) -> UserError:
    size = os.path.getsize(file) if file.exists() else 0
    found = f"{file} ({size:,} bytes): {type(error).__name__}: " + str(error).partition("\n")[0][:400]
    why = "the file is truncated or corrupt, or a git-lfs pointer in the place of one"
    return _refused(asked, found, why, f"download {file.name} again")


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
