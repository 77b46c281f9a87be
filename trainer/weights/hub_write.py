"""Writes weights in the hub's format, from any source, a parameter at a time.

transformers' own conversion, run backwards on lazy tensors (`shardwright.weights.lazy_tensors`), gives names and
shapes beforehand. So a file's header is written first, and its tensors follow as they are read.
"""

import contextlib
import itertools
import json
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.serialization import split_state_dict_into_shards_factory
from rich.console import Console
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

# semi-private: transformers/core_model_loading.py, transformers 5.23
from transformers.core_model_loading import (
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    revert_weight_conversion,
)
from transformers.trainer_utils import align_special_tokens

from shardwright.errors import UserError
from shardwright.files.arrays import keeping_last, shaped_like, whole
from shardwright.files.folder import Folder
from shardwright.files.hub_names import split
from shardwright.files.safetensors_file import bytes_of, file_header
from shardwright.model.classifier import head_parameters, padding_token
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.experts.routing import selection_biases
from shardwright.models.layers import mtp
from shardwright.report.bars import byte_bar
from shardwright.weights.hub_read import HubWeights
from shardwright.weights.lazy_tensors import Lazy
from shardwright.weights.mtp import promise_only
from shardwright.weights.names import NamesInFiles, parameter_names
from shardwright.weights.quantize import SAME, SCHEMES, QuantizedTensors, quantize
from shardwright.weights.tokenizer_files import CONFIG, local_folder, read_all, tokenizer_files, with_code, write_all
from shardwright.weights.weight_files import INDEX, WEIGHTS
from shardwright.weights.weight_sources import Source

# formats of an export by name; None: what is quantized in it, quantize.py says
FORMATS = {"bf16": torch.bfloat16, "fp32": torch.float32, **dict.fromkeys([*SCHEMES, SAME])}
_PROCESSOR = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")


@dataclass(frozen=True)
class ExportFormat:
    """The format of an export; raises UserError where its parts don't go together, or the size can't be read."""

    # original: names and shapes of the family's checkpoints on the hub, as `save_pretrained` writes them; new: as
    # transformers 5 has them in memory
    key_format: str = "original"
    max_shard_size: str = "5GB"  # of a file; one of a single tensor may be larger
    # of floating-point tensors, one of FORMATS: a dtype; a quantized format, of linear weights, with bfloat16 for the
    # rest; same: the base's. None: the source's dtypes
    format: str | None = None

    def __post_init__(self) -> None:
        if self.key_format == "new" and self.asks_base:
            raise UserError(
                asked=f"--format {self.format} --key_format new",
                found="names of transformers 5 in memory",
                why="quantized checkpoints have the names that the family has on the hub, by which loaders find them",
                instead="--key_format original; or --format bf16",
            )
        self.split({})  # refuses a size that can't be read

    @property
    def asks_base(self) -> bool:
        """Whether the base's files have a say in it."""
        return self.format is not None and FORMATS[self.format] is None

    @property
    def dtype(self) -> torch.dtype | None:
        """The dtype of what is not quantized; None: the source's or the base's."""
        return None if self.format in (None, SAME) else FORMATS[self.format] or torch.bfloat16

    def split(self, sizes: Mapping[str, int]) -> dict[str, list[str]]:
        """File name -> names of its tensors, from the tensors' sizes in bytes."""
        try:
            names, size = "model{suffix}.safetensors", self.max_shard_size
            if not re.search("[1-9]", str(size)):
                raise ValueError("no byte")
            split = split_state_dict_into_shards_factory(
                dict(sizes), get_storage_size=int, filename_pattern=names, max_shard_size=size
            )
        except ValueError as error:
            raise UserError(
                asked=f"--max_shard_size {self.max_shard_size}",
                found=str(error),
                why="it is the size of a file",
                instead="--max_shard_size 5GB",
            ) from error
        return dict(split.filename_to_tensors)


def export(
    folder: Folder | str | Path,
    model: PreTrainedModel,
    source: Source,
    tokenizer: PreTrainedTokenizerBase | None = None,
    form: ExportFormat | None = None,
    console: Console | None = None,
    base: HubWeights | None = None,
) -> None:
    """Writes a folder that `from_pretrained` loads: safetensors, config, generation config, tokenizer.

    ``base`` has the weights that training began with: its tensors that the model goes without are written as they are,
    it says their names and which are in float32, and if it is quantized which weights are quantized again.

    Every file appears whole or not at all, and the one that makes the folder a checkpoint (the only file of weights,
    or the index of several) comes last. Earlier weights there are replaced. ``model`` is plain (unstacked), on meta;
    its class knows the hub's names, and ``source`` those of its own parameters and buffers. Raises UserError if no
    space is left, or the folder can't be written.
    """
    folder, form = folder if isinstance(folder, Folder) else Folder(str(folder)), form or ExportFormat()
    tensors, stated = hub_tensors(model, source, form, base)
    promise_only(model.config, {*tensors, *(base.untrained if base is not None else ())})
    quantized = quantize(form.format, model, tensors, base) if form.format and form.asks_base else None
    if quantized is not None:
        tensors = quantized.tensors(tensors)
    tensors = (_beside(base, quantized) if base is not None else {}) | tensors
    sizes = {name: lazy.like.nbytes for name, lazy in tensors.items()}
    files = {file: sorted(names, key=lambda name: _place(tensors[name])) for file, names in form.split(sizes).items()}
    before = [n for n in folder.names() if n in (WEIGHTS, INDEX) or Path(n).match("model-*.safetensors")]
    with byte_bar(console or Console(quiet=True), "writing weights", sum(sizes.values())) as advance:
        _write_description(folder, model, tokenizer, stated, quantized.settings if quantized else None)
        if WEIGHTS not in files and INDEX in before:
            folder.remove_file(INDEX)  # else old files and new ones would look like one checkpoint
        write_files(folder, files, tensors, advance)
    if WEIGHTS not in files:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        folder.write(INDEX, json.dumps(index, indent=2).encode())
    for name in before:
        if name not in files and (name != INDEX or WEIGHTS in files):
            folder.remove_file(name)
    if quantized is not None and console is not None:
        quantized.report(console)


def _beside(base: HubWeights, quantized: QuantizedTensors | None) -> dict[str, Lazy]:
    """The tensors of ``base`` that the model goes without."""
    if quantized is not None:
        return quantized.carried(base)
    return {name: Lazy.of(array) for name, array in base.untrained.items()}


def _place(lazy: Lazy) -> tuple[bool, int]:
    """A key that sorts tensors so that each lies at a multiple of its own width, and most stay beside their neighbours.

    After those of whole 8 bytes come the others, wide dtypes first.
    """
    whole_words = lazy.like.nbytes % 8 == 0
    return not whole_words, 0 if whole_words else -lazy.dtype.itemsize


def hub_tensors(
    model: PreTrainedModel, source: Source, form: ExportFormat, base: HubWeights | None = None
) -> tuple[dict[str, Lazy], torch.dtype]:
    """The hub's name -> values of a checkpoint of ``model``, and the dtype that its config states; nothing is read yet.

    What is kept in float32, such as the biases of routers, says nothing of the dtype.
    """
    # semi-private: transformers/modeling_utils.py, transformers 5.23 (so is _keys_to_ignore_on_save below)
    tied, ignored = getattr(model, "all_tied_weights_keys", {}), set(model._keys_to_ignore_on_save or ())
    groups = parameter_names(model)
    # a tied parameter is written once, under the name to which the others are tied
    written = {next((name for name in group if name not in tied), group[0]): group[0] for group in groups}
    parameters = set(itertools.chain(*groups))
    written |= {name: name for name in model.state_dict() if name not in parameters}  # buffers
    # parameters are read whole: the hub's tensors that are cut from one follow each other
    read: Callable[[str], torch.Tensor] = keeping_last(lambda name: whole(source(name)))

    def leaf(name: str) -> Lazy:
        array = source(name)
        return Lazy.of(shaped_like(array, lambda where: read(name)[where]), name)

    tensors: dict[str, Any] = {name: leaf(known) for name, known in written.items() if name not in ignored}
    kept = kept_in_float32(model, base)
    for name, lazy in tensors.items():
        dtype = form.dtype and (torch.float32 if kept(name) else form.dtype)
        if form.format == SAME and base is not None:
            dtype = base(name).dtype
        if dtype is not None and lazy.dtype.is_floating_point:
            tensors[name] = lazy.to(dtype)
    # the dtype that holds all of these matrices: frozen ones may be stored in a narrower one, and norms in a wider
    cast = [each for name, each in tensors.items() if not kept(name)]
    dtypes = [each.dtype for each in cast if len(each.shape) > 1] or [each.dtype for each in cast]
    widest = max(dtypes, key=lambda dtype: (dtype.is_floating_point, dtype.itemsize))
    named = _by_hub_names(model, tensors, base) if form.key_format == "original" else tensors
    named = mtp.as_published(named, model)
    return (named if base is None or form.key_format == "new" else _by_names_of(base, named)), widest


def _by_hub_names(model: PreTrainedModel, tensors: dict[str, Any], base: HubWeights | None) -> dict[str, Lazy]:
    """``tensors`` under the hub's names and in its shapes; experts that ``base`` holds in one tensor stay in it."""
    fused, experts = {}, experts_modules(model)
    for own, group in (base.groups if base is not None else {}).items():
        if own.rpartition(".")[0] in experts and own in tensors and isinstance(group.transform, WeightRenaming):
            fused[own] = group.members[0][1]
    rest = revert_weight_conversion(model, {own: each for own, each in tensors.items() if own not in fused})
    if fused and base is not None and rest.keys() <= base.tensors.keys():
        return rest | {name: tensors[own] for own, name in fused.items()}
    return revert_weight_conversion(model, tensors)


def _by_names_of(base: HubWeights, named: dict[str, Lazy]) -> dict[str, Lazy]:
    """``named``, by the hub's names, under those in the files of ``base`` where these are others.

    transformers' way back is not for all families the way that it came: Kimi-Linear's dense layer gets the names of
    sparse ones, Kimi-K2.5's text those of its images. Names of one way forth, to one parameter by one pattern, are of
    one order.
    """
    others = named.keys() - base.tensors.keys()
    if not others:
        return named
    theirs: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    ours: dict[tuple[str, str | None], list[str]] = defaultdict(list)
    in_files = NamesInFiles(base.model)
    for found, names in ((theirs, base.tensors.keys() - named.keys()), (ours, others)):
        for name in sorted(names, key=dot_natural_key):
            found[in_files.become(mtp.own_name(name, base.mtp, base.model.config))].append(name)
    renamed = {
        mine: their
        for way, names in ours.items()
        if len(names) == len(theirs[way])
        for mine, their in zip(names, theirs[way], strict=True)
    }
    return {renamed.get(name, name): lazy for name, lazy in named.items()}


def says_how(base: HubWeights, model: PreTrainedModel) -> bool:
    """Whether it takes the files of ``base`` to export ``model`` under its names and in its dtypes."""
    state = {name: like for name, like in model.state_dict().items() if name in base.group_of}
    named = mtp.as_published(_by_hub_names(model, {n: Lazy.of(like, n) for n, like in state.items()}, base), model)
    of_family, of_base = kept_in_float32(model, None), kept_in_float32(model, base)
    if any(bool(of_family(name)) != bool(of_base(name)) for name in state):
        return True
    return _by_names_of(base, named).keys() != named.keys()


def kept_in_float32(model: PreTrainedModel, base: HubWeights | None) -> Callable[[str], Any]:
    """Tell by its name whether a parameter of ``model`` stays in float32 where the others are narrower.

    ``base`` has it so; if that says nothing, transformers loads it so beside bfloat16; or it is a bias that chooses
    experts, which engines read in float32, whoever rounds it: in bfloat16 it chooses others.
    """
    # semi-private: transformers/modeling_utils.py, transformers 5.23; what is not strict is kept beside float16 alone
    names: set[Any] = set(model._keep_in_fp32_modules_strict or ())
    theirs = build_glob_alternation(sorted(names))[0].search if names else lambda name: None
    biases, wide = selection_biases(model, experts_modules(model)), base.wide if base is not None else None
    return lambda name: name in biases or (theirs(name) if wide is None else name in wide)


def write_files(
    folder: Folder, files: Mapping[str, list[str]], tensors: dict[str, Lazy], advance: Callable[[int], None]
) -> None:
    """Writes the files one after the other; if one fails, removes those already written."""
    written = []
    try:
        for file, names in files.items():
            with folder.writing(file) as out:
                out.write(file_header({name: (tensors[name].shape, tensors[name].dtype) for name in names}))
                for name in names:
                    values = tensors.pop(name).read()
                    out.write(bytes_of(values))
                    advance(values.nbytes)
                    del values  # or two are held while the next is read
            written.append(file)
    except BaseException:
        for file in written:
            with contextlib.suppress(UserError):
                folder.remove_file(file)
        raise


def _write_description(
    folder: Folder,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    dtype: torch.dtype,
    quantization: Mapping[str, Any] | None,
) -> None:
    config = model.config
    config.dtype, config.architectures = dtype, [type(model).__name__]
    base = config.name_or_path
    generation: Any = getattr(model, "generation_config", None)  # a classifier has none
    parts = (config.get_text_config(), config)
    there = next((part for part in parts if getattr(part, "quantization_config", None)), config)
    for part in parts:
        vars(part).pop("quantization_config", None)
    if quantization is not None:  # else these weights are plain
        there.quantization_config = dict(quantization)
    with tempfile.TemporaryDirectory() as scratch:  # transformers writes on a disk alone
        if model.can_generate():
            with contextlib.suppress(OSError, ValueError):  # the family's, where the config's checkpoint has none
                if base:
                    repository, revision = split(base)
                    generation = GenerationConfig.from_pretrained(
                        repository, revision=revision or "main", local_files_only=True
                    )
            model.generation_config = generation
        if tokenizer is not None:
            align_special_tokens(model, tokenizer)  # as transformers' Trainer does: what ends a text ends a generation
            if head_parameters(model):
                config.get_text_config().pad_token_id = padding_token(tokenizer)  # which says where a text ends
        config.save_pretrained(scratch)
        if model.can_generate():
            # not by save_pretrained, which refuses some of the hub's generation configs
            generation.to_json_file(Path(scratch, "generation_config.json"))
        if tokenizer is not None:
            write_all(Path(scratch), tokenizer_files(tokenizer, Path(scratch, CONFIG).read_bytes()))
        origin = local_folder(base, CONFIG)
        files = read_all(origin, _PROCESSOR) if origin is not None else {}
        files |= read_all(Path(scratch), ["**/*"])
        folder.write_each(with_code(files, origin))
