"""Sources of a model's weights: a source turns a name into an array."""

import contextlib
import copy
import functools
import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.arrays import Array, mapped
from shardwright.model.meta_model import built_with

# the model's own (unstacked) name of a parameter or buffer -> its values
Source = Callable[[str], Array]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """A source of the model's own random init, made one module at a time, each from its own seed.

    So the values depend on neither the mesh nor the order of reading. ``model`` stays on meta. As in transformers, the
    modules around a module are initialised after it and may write to it again: a block zeroes its router, a model
    scales down the end of a residual branch.
    """
    model = copy.deepcopy(model)  # on meta, but for buffers
    constructed = functools.cache(functools.partial(_constructed, model, seed))

    def source(name: str) -> Array:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        with _real(module), _seeded(f"{seed}/{owner}"), torch.no_grad():
            for family, outer in _and_around(model, owner):
                # semi-private: transformers/modeling_utils.py, transformers 5.23; each part of a multimodal model
                # knows its own modules, and tensors on meta take no memory and draw no numbers
                family._init_weights(outer)
            values: torch.Tensor = getattr(module, key).detach()
        if not values.is_meta and not values.isnan().any():
            return values
        return constructed(type(module))(name)  # type: ignore[arg-type]  # mypy: a class has no hash

    return source


@contextlib.contextmanager
def _real(module: nn.Module) -> Iterator[None]:
    """Gives parameters of ``module`` itself memory inside the ``with``: NaN, to see values that nobody writes."""
    meta = dict(module._parameters)
    for name, parameter in meta.items():
        if parameter is not None:
            nothing = torch.full(parameter.shape, math.nan, dtype=parameter.dtype)
            module._parameters[name] = nn.Parameter(nothing, parameter.requires_grad)
    try:
        yield
    finally:
        module._parameters.update(meta)


@contextlib.contextmanager
def _seeded(text: str) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(zlib.crc32(text.encode()))
        yield


def _and_around(model: PreTrainedModel, name: str) -> list[tuple[PreTrainedModel, nn.Module]]:
    """The module ``name`` and those around it up to ``model``, each with the innermost transformers model around it."""
    found: list[tuple[PreTrainedModel, nn.Module]] = [(model, model)]
    for part in filter(None, name.split(".")):
        family, module = found[-1][0], found[-1][1].get_submodule(part)
        found.append((module if isinstance(module, PreTrainedModel) else family, module))
    return found[::-1]


def _constructed(model: PreTrainedModel, seed: int, kind: type[nn.Module]) -> Source:
    """A source of values that only the constructor of ``kind`` writes, such as an activation's slopes."""
    with _seeded(f"{seed}/{kind.__name__}"):
        built = built_with(model, kind).state_dict()

    def source(name: str) -> torch.Tensor:
        values = built[name]
        if values.is_meta or values.isnan().any():
            raise UserError(
                asked=f"a model of type {model.config.model_type!r} from its config alone",
                found=f"{name}, to which transformers gives no value",
                why="what lies in memory by chance would be trained",
                instead="--model with a checkpoint's folder or hub id",
            )
        return values

    return source


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """A source of the values in a state dict with the model's own names."""
    return lambda name: tensors[name].detach()


def part_of(whole: Source, names: Mapping[str, str]) -> Source:
    """A source of a part of a model, from the whole's; ``names``: a part's name -> the whole's."""
    return lambda name: whole(names.get(name, name))


def part_and_rest(part: Source, rest: Source, names: Mapping[str, str]) -> Source:
    """A source of a whole model, from its part's and the rest's; ``names``: a part's name -> the whole's."""
    own = {full: name for name, full in names.items()}
    return lambda name: part(own[name]) if name in own else rest(name)


def in_dtype(source: Source, dtype: torch.dtype | None, kept: Callable[[str], Any]) -> Source:
    """``source`` with floating-point values in ``dtype``, if it is given; the names that are ``kept`` in float32."""

    def cast(name: str) -> Array:
        array = source(name)
        if dtype is None or not array.dtype.is_floating_point:
            return array
        return mapped(array, lambda part: part, torch.float32 if kept(name) else dtype)

    return cast
