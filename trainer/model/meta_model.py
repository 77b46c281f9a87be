"""The model as transformers describes it: its config, and its module on meta, without memory."""

import copy
import itertools
import math
import mmap
import os
import re
from collections.abc import Callable, Mapping
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto import modeling_auto

from shardwright.errors import UserError, in_short, nearest_beside
from shardwright.files.hub_names import ADAPTER_CONFIG, ADAPTERS_MODEL, hub_error, is_hub_name, pinned, split
from shardwright.layout.recipe import Recipe
from shardwright.models.experts import expert_families
from shardwright.models.layers import mtp, rope

MOST_BUFFER = 2**24  # elements: a mask of 4,096 positions
LARGE_ZEROS = 2**16  # elements
_DRAWS = ("torch.nn.init", "transformers.initialization")  # the latter puts its functions in the former's place
# what other draws are made of; on meta some of these are computed in Python, and take milliseconds to compute nothing
_FILLS = tuple(
    getattr(torch.Tensor, f"{name}_") for name in ("uniform", "normal", "erfinv", "clamp", "mul", "add", "zero", "fill")
)
MOST_LAYERS, MOST_MODULES, MOST_WIDE = 1_000, 100_000, 1 << 20  # all far beyond any model
_CONFIGS = (Path(__file__).parents[1] / "configs", Path(__file__).parents[2] / "docs/configs")  # installed; a checkout


def model_path(model: str) -> str:
    """``model``; but the package's own file for a ``docs/configs/NAME.json`` that is not there."""
    named = re.fullmatch(r"docs/configs/(\w+\.json)", model)
    shipped = [folder / named[1] for folder in _CONFIGS if named and not os.path.exists(model)]
    return next((str(file) for file in shipped if file.is_file()), model)


def means_weights(model: str | None, from_scratch: bool) -> bool:
    """Whether a run of ``model`` starts from its weights: of a hub id, a folder or a GGUF file, and not of a config."""
    path = model_path(str(model))
    return bool(model) and not from_scratch and (path.endswith(".gguf") or not os.path.isfile(path))


def load_config(model: str | None, recipe: Recipe) -> PretrainedConfig:
    """The config of ``model``: a folder with a ``config.json``, such a file or a GGUF file, or a hub id.

    None: the recipe's own.

    Raises UserError if nothing is there, the config is unreadable, or the recipe has no default model.
    """
    if model is None and recipe.model is None:
        raise UserError(
            asked=f"recipe {recipe.name} without a model",
            found="the recipe has no default model",
            why="a plan needs shapes",
            instead="--model with a hub id, a folder, or a config.json; or a --recipe with a model of its own, such as "
            "mixtral_ep",
        )
    if model is not None:
        _check_path(model := model_path(model))
    try:
        if model is None:
            return config_of(recipe.model or {})
        return _config_at(model := pinned(model))
    except UserError:
        raise
    except Exception as error:  # transformers and the hub client raise many types when no config can be read
        if model is not None and is_hub_name(model):
            raise hub_error(f"model {model}", model, error) from error
        raise UserError(
            asked=f"model {model}" if model else f"recipe {recipe.name}: its default model",
            found=in_short(error),
            why="no transformers config can be read from it",
            instead="a config.json whose model_type transformers knows, a folder with one, or a hub id, "
            "which needs network, or the hub's cache (HF_HUB_OFFLINE=1 looks only there)",
        ) from error


def _check_path(model: str) -> None:
    """Refuse a ``model`` that is a path, or looks like one, and leads to no config."""
    path = Path(model)
    looks_local = model.endswith((".json", ".gguf")) or model.startswith((".", "~", os.sep))
    looks_local |= split(model)[0].count("/") > 1
    # os.path.isfile, since a Path's would raise for a name that is too long
    config_file = path / "config.json" if os.path.isdir(path) else path
    if (looks_local or os.path.exists(path)) and not os.path.isfile(config_file):
        found, instead = f"no file {config_file}", nearest_beside(model) * (not os.path.exists(path))
        instead += "the path of such a file or folder, or a hub id such as mistralai/Mixtral-8x7B-v0.1"
        if below := _models_below(path):
            instead = f"{below[0]}, which is there; or {instead}"
        if os.path.isfile(path / ADAPTER_CONFIG):
            found, instead = f"{found}, but {ADAPTER_CONFIG}", ADAPTERS_MODEL
        why = "a local model is a config.json, or a folder that has one"
        raise UserError(asked=f"model {model}", found=found, why=why, instead=instead)


def _models_below(path: Path) -> list[Path]:
    """The model that a run has left in its output folder ``path``, or the GGUF files of a folder."""
    if not os.path.isdir(path):
        return []
    left = path / "model"
    return [left] * os.path.isfile(left / "config.json") + sorted(path.glob("*.gguf"))


def _config_at(model: str) -> PretrainedConfig:
    repository, revision = split(model)
    how: dict[str, Any] = {"revision": revision}
    if model.endswith(".gguf"):  # it holds its config, which transformers reads through the package gguf
        repository, how = str(Path(model).parent), {"gguf_file": Path(model).name}
    values = PretrainedConfig.get_config_dict(repository, **how)[0]
    _check_values(values)
    if values.get("model_type", "llama") not in CONFIG_MAPPING:
        raise _unknown_type(model, values)
    config = AutoConfig.from_pretrained(repository, trust_remote_code=False, **how)
    config.name_or_path = model  # with its commit: the generation config and other files come from there
    return config


def _unknown_type(model: str, values: Mapping[str, Any]) -> UserError:
    """The refusal of a config whose `model_type` the installed transformers does not have."""
    kind, installed = values["model_type"], transformers.__version__
    found = f"model_type {str(kind)[:80]!r} is unknown to transformers {installed}, and code of a model's own"
    if isinstance(code := values.get("auto_map"), Mapping):
        found += f" ({str(next(iter(code.values()), None))[:80]})"
    taken = next((each for each in requires("shardwright") or () if each.startswith("transformers")), "transformers")
    instead = f"a newer transformers may know it (pip install --upgrade '{taken}')"
    wrote = str(values.get("transformers_version", ""))[:20]
    if re.match(r"\d+\.\d+", wrote) and _release(wrote) > _release(installed):
        instead = f"transformers {wrote}, which wrote this config and knows it, with a Shardwright that takes that one "
        instead += f"(this: {taken})"
    own = values.get("architectures") or ()
    # semi-private: transformers/models/auto/modeling_auto.py, transformers 5.23
    known = [(kind, name) for kind, name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items() if name in own]
    if known:  # of a class that several types share, the one whose name it bears
        kind, name = max(known, key=lambda each: each[1].lower().startswith(each[0].replace("_", "")))
        instead += f"; or, since its architecture is {name}, a copy of its files with model_type {kind!r}"
    return UserError(
        asked=f"model {model}",
        found=found + " is never run",
        why="a model is built from transformers' own class",
        instead=instead + "; or a model of a type that it knows",
    )


def _release(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def config_of(values: Mapping[str, Any]) -> PretrainedConfig:
    """The config of these values, ``model_type`` among them; raises ValueError as `_check_values` does.

    transformers raises errors of many types where it refuses a value.
    """
    _check_values(values)
    return AutoConfig.for_model(**values)


def _check_values(values: Mapping[str, Any]) -> None:
    """Raises ValueError for sizes that would fill the host's memory even on meta, and for no list of class names.

    Some configs make a list with an entry for each layer, and RoPE's frequencies are real values as wide as a head.
    """
    classes = values.get("architectures") or []
    if not isinstance(classes, str | list) or not all(isinstance(each, str) for each in classes):
        raise ValueError(f"architectures is {str(classes)[:40]}; it is a list of names")
    layers = r"^n(um)?_\w*layer|layers?$"  # such as num_layers_per_stack, and not vocab_size_per_layer_input
    for name, value in values.items():
        if isinstance(value, Mapping):
            _check_values(value)
        elif re.search(layers, str(name)) and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(f"{name} is {str(value)[:40]}; {MOST_LAYERS:,} layers are the most")
        elif str(name).endswith("dim") and isinstance(value, int) and value > MOST_WIDE:
            raise ValueError(f"{name} is {str(value)[:40]}; {MOST_WIDE:,} is the widest")


class _Unallocated(TorchFunctionMode):
    """While active, the tensors that become parameters on meta take no memory, and no time to be drawn.

    Tensors larger than any buffer are made on meta at once (a layer's experts in a 671 B model would take 30 GB), and
    large zeros are untouched pages.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if getattr(func, "__module__", None) in _DRAWS and kwargs["tensor"].is_meta:
            return kwargs["tensor"]
        if func in _FILLS and args[0].is_meta and not any(isinstance(other, torch.Tensor) for other in args[1:]):
            return args[0]
        if func in (torch.empty, torch.zeros, torch.ones, torch.rand, torch.randn, torch.full):
            size = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
            if math.prod(size) > MOST_BUFFER:
                kwargs["device"] = "meta"
            elif func is torch.zeros and math.prod(size) > LARGE_ZEROS and not kwargs.keys() - {"size"}:
                return torch.frombuffer(mmap.mmap(-1, 4 * math.prod(size)), dtype=torch.float32).view(size)
        return func(*args, **kwargs)


def is_multimodal(config: PretrainedConfig) -> bool:
    """Whether the model of ``config`` has a text part beside others, such as a vision tower."""
    return type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and config.get_text_config() is not config


def scores_texts(config: PretrainedConfig) -> bool:
    """Whether ``config`` says that its model is one of sequence classification."""
    # semi-private: transformers/models/auto/modeling_auto.py, transformers 5.23
    own = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    return own is not None and own in (config.architectures or ())


def meta_model(config: PretrainedConfig, train_mtp: bool = False) -> PreTrainedModel:
    """The causal-LM model of ``config`` on meta, or that of sequence classification: names, shapes, ties, no memory.

    For a multimodal config it is the text part: the family's own causal-LM class of the text, with that class's names,
    or if there is none the whole class without the parts that text never meets.

    Weights are float32 whatever the config's dtype: training keeps them so, also under bfloat16 compute.

    ``train_mtp``: with its MTP layers, which transformers leaves out.

    Raises UserError if the config has no causal-LM head or no such layers, or transformers cannot build the model.
    """
    if train_mtp and not mtp.count_of(config):
        count = mtp.FORMATS[config.model_type].count if config.model_type in mtp.FORMATS else None
        raise UserError(
            asked=f"--train_mtp with a model of type {config.model_type!r}",
            found=f"a config with {count}={getattr(config, count, None)}"
            if count
            else "a family whose MTP layers are not known here",
            why="there are no MTP layers to build",
            instead=f"no --train_mtp; or a checkpoint that has such layers, of type {', '.join(mtp.FORMATS)}",
        )
    if scores_texts(config):
        model = _on_meta(AutoModelForSequenceClassification.from_config, config)
        text = model.config.get_text_config()
        # with none its forward takes a single row; after it is built, since it is a part of some embeddings
        text.pad_token_id = 0 if text.pad_token_id is None else text.pad_token_id
        return model
    if is_multimodal(config):
        return _text_part(config)
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found="a model without a causal-LM head",
            why="training predicts the next token",
            instead="a decoder that AutoModelForCausalLM loads, such as mixtral, llama or qwen2",
        )
    # semi-private: transformers/models/auto/modeling_auto.py, transformers 5.23
    own, decoder = config.architectures, modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)
    if config.is_encoder_decoder and own and decoder not in own:  # one of them would be lost
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found=f"{own[0]} is an encoder and a decoder",
            why="training predicts the next token of one text, and has no second one to encode",
            instead="a decoder that AutoModelForCausalLM loads, such as mixtral, llama or qwen2",
        )
    build = AutoModelForCausalLM.from_config
    model = _on_meta(mtp.builder(build) if train_mtp else build, config)
    # families that can be encoders mark their layers; the config's own `is_decoder` is false in some decoders too
    if encoder := next((name for name, m in model.named_modules() if getattr(m, "is_decoder", None) is False), None):
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found=f"{encoder}.is_decoder is False: it is built as an encoder",
            why="training predicts the next token, and an encoder's tokens see it",
            instead='"is_decoder": true in its config.json',
        )
    return model


def whole_model(config: PretrainedConfig) -> PreTrainedModel:
    """The model of a full checkpoint of a multimodal config on meta, with all of its parts; raises as `meta_model`."""
    return _on_meta(AutoModelForImageTextToText.from_config, config)


def names_in_whole(part: PreTrainedModel, whole: PreTrainedModel) -> dict[str, str] | None:
    """Name in ``part`` → name in ``whole`` of each parameter and saved buffer; None if ``part`` does not lie in it.

    The outermost model of transformers in ``part`` whose class occurs just once in ``whole`` is taken for the same.
    """
    mine, theirs = part.state_dict(), whole.state_dict()
    models = [(name, module) for name, module in part.named_modules() if isinstance(module, PreTrainedModel)]
    for prefix, module in models:  # the outermost first
        places = [name for name, other in whole.named_modules() if type(other) is type(module)]
        if len(places) == 1:
            inside, place = (f"{name}." if name else "" for name in (prefix, places[0]))
            found = {name: place + name.removeprefix(inside) if name.startswith(inside) else name for name in mine}
            fits = all(full in theirs and theirs[full].shape == mine[name].shape for name, full in found.items())
            return found if fits else None
    return None


def _text_part(config: PretrainedConfig) -> PreTrainedModel:
    whole, text = whole_model(config), copy.deepcopy(config.get_text_config())
    text.tie_word_embeddings = _head(whole).weight is whole.get_input_embeddings().weight
    for known in (text, config):  # a few families' class of the text alone takes the whole config
        if type(known) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
            try:
                part = _on_meta(AutoModelForCausalLM.from_config, known)
            except UserError:  # some of these classes can't be built from the config that maps to them
                continue
            if type(part) is not type(whole) and names_in_whole(part, whole) is not None:
                return part
    return text_in_whole(config)


def text_in_whole(config: PretrainedConfig) -> PreTrainedModel:
    """The whole model of a multimodal ``config`` on meta, without the parameters that text never meets."""
    whole = whole_model(config)
    kept = {module for top in (whole.get_decoder(), _head(whole)) for module in top.modules()}
    for module in [module for module in whole.modules() if module not in kept]:
        for name in list(module._parameters):
            module.register_parameter(name, None)
        for name, child in list(module.named_children()):
            if kept.isdisjoint(child.modules()):
                setattr(module, name, nn.Identity())
    return whole


def _head(whole: PreTrainedModel) -> nn.Module:
    """The output embeddings of a multimodal model; UserError if it has none, or an encoder reads its text."""
    head, lacks = whole.get_output_embeddings(), "names no text decoder and head of its own"
    if whole.config.is_encoder_decoder:
        head, lacks = None, "is an encoder and a decoder"
    if head is None or not isinstance(getattr(whole, "get_decoder", lambda: None)(), PreTrainedModel):
        raise UserError(
            asked=f"a model of type {whole.config.model_type!r}",
            found=f"{type(whole).__name__} {lacks}",
            why="of a multimodal model the text part is trained",
            instead="a family such as gemma3, llava, mistral3, llama4 or qwen3_vl",
        )
    return head


def built_with(model: PreTrainedModel, kind: type[nn.Module]) -> PreTrainedModel:
    """``model`` built again, with transformers' own initial values in modules of class ``kind``."""
    build = type(model)._from_config  # semi-private: modeling_utils.py, transformers 5.23
    return _on_meta(mtp.builder(build) if mtp.layer_names(model) else build, model.config, kind)


def _on_meta(
    build: Callable[..., PreTrainedModel], config: PretrainedConfig, real: type[nn.Module] | None = None
) -> PreTrainedModel:
    """``build(config)``, a ``from_config`` of transformers, on meta; modules of class ``real`` have values.

    Unlike under ``torch.device("meta")``, buffers keep their values: RoPE's frequencies are in no checkpoint.
    """
    made = itertools.count(1)

    def count(parent: nn.Module, name: str, child: nn.Module | None) -> None:
        if next(made) > MOST_MODULES:  # nothing else would end it
            raise ValueError(f"a model of more than {MOST_MODULES:,} modules")

    def move(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        # an adapted class of ours is a subclass of transformers', with other methods
        if parameter is None or (real is not None and type(module) is not nn.Module and issubclass(real, type(module))):
            return None
        return nn.Parameter(parameter.to("meta"), parameter.requires_grad)

    hooks = nn.modules.module
    try:
        with (
            hooks.register_module_module_registration_hook(count),
            # torch types the hook as returning nothing, yet uses its result
            hooks.register_module_parameter_registration_hook(move),  # type: ignore[arg-type]
            _Unallocated(),
        ):
            # a copy: choosing a model's kernels writes into its config
            model = build(copy.deepcopy(config), dtype=torch.float32)
        expert_families.adapt(model)
        rope.fix_frequencies(model)
        model.tie_weights()  # each assignment has made a new parameter, and ties are lost
        # all callers need these two, so their absence is an error here
        _ = config.get_text_config().vocab_size, model.get_input_embeddings().weight
    except Exception as error:  # the sizes in a config are the user's, and may break a model with any error
        raise UserError(
            asked=f"a model of type {config.model_type!r}",
            found=in_short(error),
            why="transformers cannot build a model from this config",
            instead="the package that it names, in this environment"
            if isinstance(error, ImportError)
            else "sizes that go together in its config.json",
        ) from error
    return model
