"""A source of weights in the hub's formats: files mapped into memory, under the model's own names.

Opening reads and checks the files' headers alone. Reading a slice of a parameter reads only its slices of the files.
transformers' own conversion mapping tells which those are, so checkpoints of older formats load as well.
"""

import copy
import functools
import math
import os
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

from shardwright.errors import UserError, a_type
from shardwright.files.arrays import Array, is_finite, mapped, shaped_like
from shardwright.files.hub_names import is_hub_name
from shardwright.model.base_storage import quantization_settings
from shardwright.model.classifier import head_parameters
from shardwright.models.layers import mtp
from shardwright.report.bars import byte_bar
from shardwright.report.lines import say
from shardwright.weights import gguf_file
from shardwright.weights.formats.format import DEQUANTIZED, WIDE_FLOATS
from shardwright.weights.formats.plain_weights import FormatError, PlainWeights, plain
from shardwright.weights.hub_files import fetched
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.mtp import mtp_names
from shardwright.weights.names import NamesInFiles, dtype_name, first_names, parameter_names
from shardwright.weights.remote_file import RemoteFile
from shardwright.weights.weight_files import GGUF, files_in, mark_of, open_file, refused, unreadable
from shardwright.weights.weight_sources import in_dtype, seeded_init
from shardwright.weights.wrapper_prefixes import without_prefixes

_PLAIN = "the checkpoint in bfloat16 or float32"
# name -> tensor, and the file that it lies in
Stored = Mapping[str, tuple[Array, Path | RemoteFile]]


@dataclass
class Group:
    """Tensors that one of transformers' transforms converts together."""

    name: str  # the first parameter that they become
    transform: WeightConverter | WeightRenaming
    members: list[tuple[str, str]] = field(default_factory=list)  # (source pattern, tensor's name in the files)


class HubWeights:
    """A source of the weights in ``files``, which the user ``asked`` for by this name.

    ``model`` is transformers' own, on meta; its class knows the hub's names. ``rows``: the least rows that a file may
    have of a parameter, whose others an adapter has; they are read as zeros. ``packed``: parameters that will be packed
    as the files have them, for which all that is quantized is dequantized to float32, and not to bfloat16.

    Raises UserError if a file is truncated or corrupt; tensors are missing, left over, or of another shape than the
    config says; tied parameters differ; or one of ``packed`` is not quantized.
    """

    def __init__(
        self,
        asked: str,
        files: Sequence[Path | RemoteFile],
        model: PreTrainedModel,
        seed: int = 0,
        rows: Mapping[str, int] = MappingProxyType({}),
        packed: Collection[str] = (),
    ) -> None:
        self.asked, self.model, self.mtp, self.seed, self.rows = asked, model, mtp.layer_names(model), seed, rows
        self.paths = [file for file in files if isinstance(file, Path)]
        self.dtype = torch.float32 if packed else DEQUANTIZED
        self.watch: Callable[[int], None] = lambda count: None  # told the bytes of each read
        self.formats: Counter[str] = Counter()  # titles of quantized formats -> tensors in them
        opened = {name: (array, file) for file in files for name, array in self._open(file).items()}
        stored, self.prefixes = self._without_prefixes(opened)
        self.published = self._dequantized(stored)
        self.tensors = self.published.tensors
        self.files = {name: file.name for name, (_, file) in stored.items()}
        for name, weight in self.published.packed.items():
            self.files[name] = first_names({self.files[weight.stem + tail] for tail in weight.parts})
        self.formats.update(weight.form.title for weight in self.published.packed.values())
        self.groups = self._match()
        self.begun, self.left = self._other_head()
        self.untrained = self._set_aside()  # by the files' names: what they hold, and the model goes without
        self.tied = {name: set(names) for names in parameter_names(model) for name in names}
        self.group_of: dict[str, Group] = {}
        found: dict[str, torch.Tensor] = {}  # on meta
        for group in self.groups.values():
            for name, lazy in self._convert(group).items():
                found[name], self.group_of[name] = lazy.like, group
        self.wide = self._wide(found)
        self.short = {
            name: state.shape[0]
            for name, state in model.state_dict().items()
            if name in found and name in rows and rows[name] <= found[name].shape[0] < state.shape[0]
        }
        self._check(found)
        self._check_packed(packed)
        if not any(isinstance(file, RemoteFile) for file in files):  # which has no values here
            self._check_tied()

    @functools.cached_property
    def mark(self) -> str:
        """A mark of the files' values, which a checkpoint keeps where its run reads them again."""
        return mark_of(self.paths)

    def changed(self, saved: Mapping[str, Any]) -> str:
        """A line where the run of a checkpoint, whose host state is ``saved``, read other files; else empty."""
        if saved.get("base") in (None, self.mark):
            return ""
        return f"the files of {self.asked} are others than when the checkpoint was trained beside them: other weights"

    @property
    def total_bytes(self) -> int:
        """The bytes of the model's tensors in the files."""
        names = [name for group in self.groups.values() for _, name in group.members]
        read = [tensor for name in names for tensor in self.published.stored(name)]
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in read)

    @property
    def said(self) -> str:
        """The quantized formats, for a run's first lines: "MXFP4 (48 tensors), dequantized to bfloat16", or ""."""
        listed = ", ".join(f"{title} ({count:,} tensors)" for title, count in self.formats.items())
        return listed and f"{listed}, dequantized to {dtype_name(self.dtype)}"

    def __call__(self, name: str) -> Array:
        """Returns a parameter or buffer as an array; nothing is read yet."""
        for twin in (name, *self.tied.get(name, ())):
            if twin in self.group_of:
                lazy: Any = self._convert(self.group_of[twin])[twin]
                if twin in self.short:  # the rows that an adapter has are zeros
                    missing = self.short[twin] - lazy.shape[0]
                    rows: Any = Lazy.of(torch.zeros(missing, *lazy.shape[1:], dtype=lazy.dtype))
                    lazy = torch.cat([lazy, rows])
                return shaped_like(lazy.like, lazy.read)
        if name in self.begun:
            dtype = self(next(iter(self.group_of))).dtype
            return in_dtype(seeded_init(self.model, self.seed), dtype, lambda name: None)(name)
        return self.model.get_buffer(name)  # no file need hold it: the model's class has computed it

    def _open(self, file: Path | RemoteFile) -> Mapping[str, Array]:
        """Name -> tensor of a file; of one in a repository only the header is fetched."""

        def counted(part: torch.Tensor) -> torch.Tensor:
            self.watch(part.nbytes)
            return part

        if isinstance(file, RemoteFile):
            return file.arrays
        try:
            if file.suffix == GGUF:
                arrays, counts = gguf_file.open_gguf(file, self.model, lambda count: self.watch(count))
                self.formats.update(counts)
                return arrays
            return {name: mapped(view, counted) for name, view in open_file(file).items()}
        except UserError:
            raise
        except Exception as error:  # safetensors', gguf's, unpickling's, and torch's for shapes that it can't hold
            raise unreadable(self.asked, file, error) from error

    def _without_prefixes(self, stored: Stored) -> tuple[Stored, list[str]]:
        """The tensors without what wrappers of the model put before their names, and those prefixes."""
        try:
            return without_prefixes(stored, self.model)
        except ValueError as error:
            why = "a wrapper of the model (torch.compile, PEFT, …) seems to have put it before some of the names"
            raise refused(self.asked, str(error), why, "files that hold each weight once") from error

    def _dequantized(self, stored: Stored) -> PlainWeights:
        """The tensors as plain weights; raises UserError where they are quantized and can't be read."""
        settings = quantization_settings(self.model.config)
        try:
            arrays = {name: array for name, (array, _) in stored.items()}
            return plain(arrays, settings, self._goes_without, self.dtype)
        except FormatError as error:
            files = first_names({stored[tensor][1].name for tensor in error.tensors if tensor in stored})
            why = "quantized weights are read with the tensors that say what their codes stand for"
            instead = f"all of the files, as they were published; or {_PLAIN}"
            raise refused(self.asked, f"{error} (in {files})", why, instead) from error

    def _goes_without(self, names: Set[str]) -> Set[str]:
        """The ``names`` that the model has no part of, and its family says so."""
        ahead = mtp_names(names, self.model.config)
        copies = {name for name in ahead if not self.mtp or mtp.is_copy(name, self.mtp)}
        return (names - self._adjusted(set(), names)[1] - ahead) | copies

    def _match(self) -> dict[str, Group]:
        """Groups the files' tensors by the first parameter that they become; one that becomes none is left over."""
        names, groups = NamesInFiles(self.model), dict[str, Group]()
        for tensor in sorted(self.tensors, key=dot_natural_key):
            key = mtp.own_name(tensor, self.mtp, self.model.config)
            name, pattern = names.become(key)
            transform = WeightRenaming(key, name) if pattern is None else names.by_pattern[pattern]
            groups.setdefault(name, Group(name, transform)).members.append((pattern or key, tensor))
        return groups

    def _other_head(self) -> tuple[list[str], list[str]]:
        """Takes another head's groups out, where files of a language model become a reward model's decoder.

        Returns the parameters of the model's own head, which begin anew, and the other one's tensors in the files.
        """
        own, decoder = head_parameters(self.model), f"{self.model.base_model_prefix}."
        if not own or self.groups.keys() & set(own):
            return [], []
        other = {name for name in self.groups if not name.startswith(decoder)}
        other -= mtp_names(other, self.model.config)
        return own, [tensor for name in sorted(other) for _, tensor in self.groups.pop(name).members]

    def _set_aside(self) -> dict[str, Array]:
        """Takes the groups out that no parameter needs and none misses: MTP layers, what its family says to ignore.

        Of MTP layers that are trained those are copies of other weights, and are not kept.
        """
        other = self.groups.keys() - self.model.state_dict().keys()
        ignored = (other - self._adjusted(set(), other)[1]) | mtp_names(other, self.model.config)
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

    def _convert(self, group: Group) -> dict[str, Lazy]:
        """Name -> values of all parameters that a group becomes, in its tensors' dtype; else raises UserError."""
        name, tensors = group.name, [tensor for _, tensor in group.members]
        transform = copy.deepcopy(group.transform)  # which keeps the tensors that are added to it
        for pattern, tensor in group.members:
            lazy: Any = Lazy.of(self._finite(name, tensor))  # torch's functions take it for a tensor
            transform.add_tensor(name, tensor, pattern, lazy)
        try:
            found = transform.convert(name, model=self.model, config=self.model.config)
        except Exception as error:  # of torch's and of transformers' kinds
            text = f"{len(tensors)} tensors that make {name} do not go together: {first_names(tensors)} ({error})"
            instead = "a complete checkpoint, with the config.json that it was saved with"
            raise refused(self.asked, text, "transformers' conversion of them fails", instead) from error
        parts = {key: value[0] if isinstance(value, list) else value for key, value in found.items()}
        # some conversions end in the dtype of a parameter of the model, which is made in float32
        narrow = (stored := {self.tensors[tensor].dtype for tensor in tensors}) in ({torch.bfloat16}, {torch.float16})
        return {key: part.to(*stored) for key, part in parts.items()} if narrow else parts

    def _finite(self, name: str, tensor: str) -> Array:
        """``tensor`` of the files, of the parameter ``name``; reads raise UserError for what is no finite number."""
        array = self.tensors[tensor]
        if name not in self.tied or not array.dtype.is_floating_point or array.dtype.itemsize == 1:
            return array

        def checked(part: torch.Tensor) -> torch.Tensor:
            if not is_finite(part):
                text = f"{tensor} with values that are infinite or no numbers (in {self.files[tensor]})"
                why = "the first step would make all of the model's numbers so"
                raise refused(self.asked, text, why, "the files as they were published, or an earlier checkpoint")
            return part

        return mapped(array, checked)

    def _wide(self, found: Mapping[str, torch.Tensor]) -> frozenset[str] | None:
        """The parameters in float32 beside larger ones in fewer bits; None: the files don't say which are to be.

        All are in float32; or the file is GGUF, which has every vector so.
        """
        floating = {name: like for name, like in found.items() if like.is_floating_point()}
        largest = max(floating.values(), key=lambda like: like.numel(), default=torch.empty(0))
        if largest.dtype == torch.float32 or any(path.suffix == GGUF for path in self.paths):
            return None
        return frozenset(name for name, like in floating.items() if like.dtype == torch.float32)

    def _check(self, found: Mapping[str, torch.Tensor]) -> None:
        """Raises UserError unless every parameter has values of its shape and kind and no tensor is left over."""
        state = self.model.state_dict()
        absent = (state.keys() - found.keys()) & self.tied.keys()
        missing, unexpected = self._adjusted(state.keys() - found.keys(), found.keys() - state.keys())
        missing = (missing - absent) | {n for n in absent if not found.keys() & self.tied[n]} - set(self.begun)
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
            f"{n} {ours} where the config says {theirs}"
            for n, (ours, theirs) in shapes.items()
            if ours != theirs and (n not in self.short or ours[1:] != theirs[1:])
        ]
        kinds = (("missing", missing), ("left over", unexpected), ("of another shape", misshapen))
        wrong = [f"{len(names)} {kind}: {first_names(names)}" for kind, names in kinds if names]
        if wrong:
            fit = f"they do not fit its config ({a_type(self.model)})"
            why = f"{fit}: training would start from other weights than these without a word"
            instead = "the config.json that the weights were saved with, and all of the files"
            settings = quantization_settings(self.model.config)
            if unexpected and settings:
                method = settings.get("quant_method") or settings.get("quant_algo")
                why += f"; config.json says that they are quantized ({method}), in a way that is not read"
                instead += f"; or {_PLAIN}"
            raise refused(self.asked, "tensors " + "; tensors ".join(wrong), why, instead)
        floating = {name: found[name].dtype for name in shapes if state[name].is_floating_point()}
        other = [f"{name} in {dtype}" for name, dtype in floating.items() if dtype not in WIDE_FLOATS]
        if other:
            text = f"{len(other)} tensors of no floating-point numbers: {first_names(other)}"
            why = "they are quantized, or of another kind: taken as they stand they would be other weights"
            raise refused(self.asked, text, why, _PLAIN)

    def _check_packed(self, names: Collection[str]) -> None:
        """Raises UserError where one of these parameters, which the config says are quantized, is not."""
        in_files = {name: [tensor for _, tensor in self.group_of[name].members] for name in names}
        plain = [tensor for each in in_files.values() for tensor in each if tensor not in self.published.packed]
        if plain:
            text = f"{len(plain)} tensors that are not quantized, and are by its config: {first_names(plain)}"
            why = "packed like the others they would be rounded, and nothing said so"
            raise refused(self.asked, text, why, "another --base_dtype; or config.json as it was published")

    def _check_tied(self) -> None:
        """Raises UserError where the files hold a tied parameter under two names, with different values."""
        for names in parameter_names(self.model):
            held = sorted(self.group_of.keys() & set(names))
            for twin in held[1:]:
                if not _equal(self(held[0]), self(twin)):
                    why = "its config ties them (tie_word_embeddings), so one of the two would be lost"
                    instead = '"tie_word_embeddings": false in its config.json'
                    raise refused(self.asked, f"{held[0]} and {twin} differ in its files", why, instead)


def open_hub_weights(
    name: str,
    model: PreTrainedModel,
    console: Console | None = None,
    seed: int = 0,
    rows: Mapping[str, int] = MappingProxyType({}),
    packed: Collection[str] = (),
) -> HubWeights:
    """Opens the weights of ``model`` (on meta) in the folder ``name``, or of that hub id (``id@revision``), fetched.

    ``seed`` is of a reward model's head, where the files are a language model's; ``rows`` and ``packed`` as
    :class:`HubWeights` has them. Raises UserError if there are none, or :class:`HubWeights` refuses them.
    """
    console = console or Console(quiet=True)
    found = _opened(name, model, console, seed, rows, packed)
    if found.prefixes:
        say(console, f"weights: names without {' and '.join(map(repr, found.prefixes))}")
    for short, size in found.short.items():
        say(console, f"weights: {short} has {size} rows, as the adapter says, the last of which are its own alone")
    if found.begun:
        without = f", without {first_names(found.left)}" if found.left else ""
        begun = f"{first_names(found.begun)} begins at random, where no checkpoint has it"
        say(console, f"weights: those of a language model{without}; {begun}")
    return found


def _opened(name: str, model: PreTrainedModel, console: Console, seed: int, *more: Any) -> HubWeights:
    if not os.path.exists(name) and not is_hub_name(name):
        why = "what looks like a path must lie here"
        raise refused(name, f"no folder {name}", why, "the folder of the weights, or a hub id")
    folder = Path(name) if os.path.exists(name) else fetched(name, console)
    return HubWeights(name, files_in(name, folder), model, seed, *more)


def reopen_hub_weights(name: str, model: PreTrainedModel, console: Console, seed: int = 0) -> HubWeights | None:
    """The weights that a run started from, for what they hold beside the model; None, and a word, if they are gone."""
    try:
        return _opened(name, model, console, seed)
    except UserError as error:
        held = f"what {name} held beside the model, and the names and dtypes in its files"
        say(console, f"lost:    {held}; an export goes without, as its config says: {error.found}")
        return None


@contextmanager
def reading(weights: HubWeights, console: Console) -> Iterator[None]:
    """Shows inside the ``with`` how many bytes of ``weights`` have been read."""
    with byte_bar(console, "reading weights", weights.total_bytes) as weights.watch:
        yield
    weights.watch = lambda count: None


def _equal(one: Array, other: Array) -> bool:
    """Whether two arrays hold the same values; reads 4096 rows at a time."""
    parts = [(slice(i, i + 4096), *[slice(None)] * (len(one.shape) - 1)) for i in range(0, one.shape[0], 4096)]
    return all(torch.equal(one[part], other[part]) for part in parts)
