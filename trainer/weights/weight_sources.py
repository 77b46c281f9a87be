"""Sources of a model's weights: a source turns a name into an array."""

from __future__ import annotations

import contextlib
import copy
import math
import os
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.files.arrays import Array
from shardwright.model.meta_model import built_with, model_path

# the model's own (unstacked) name of a parameter or buffer -> its values
Source = Callable[[str], Array]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """Returns a source of the model's own random init, which makes one module at a time, each from its own seed.

    So the values depend on neither the mesh nor the order of reading, and the host holds one module at a time.
    ``model`` is on meta and stays there. As in transformers, a module is initialised first and then whatever it is in,
    which may write to it again: a block zeroes its router, a model scales down what ends a residual branch.
    """
    model = copy.deepcopy(model)  # on meta, but for buffers
    constructed: dict[type[nn.Module], Source] = {}

    def source(name: str) -> Array:
        owner, _, key = name.rpartition(".")
        module = model.get_submodule(owner)
        with _real(module), _seeded(f"{seed}/{owner}"), torch.no_grad():
            for outer in _and_around(owner):
                # semi-private: transformers/modeling_utils.py, transformers 5.23; each part of a multimodal model
                # knows its own modules, and what is on meta takes no memory and draws no numbers
                _family(model, outer)._init_weights(model.get_submodule(outer))
            values: torch.Tensor = getattr(module, key).detach()
        if not values.is_meta and not values.isnan().any():
            return values
        if (kind := type(module)) not in constructed:
            constructed[kind] = _constructed(model, kind, seed)
        return constructed[kind](name)

    return source


@contextlib.contextmanager
def _real(module: nn.Module) -> Iterator[None]:
    """While the ``with`` lasts, parameters of ``module`` itself have memory: NaN, so that what nobody writes is seen.

    Its buffers have it already, with the values of their constructor.
    """
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


def _and_around(name: str) -> Iterator[str]:
    """``name`` and what it is in, up to the model, whose name is empty."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _constructed(model: PreTrainedModel, kind: type[nn.Module], seed: int) -> Source:
    """A source of what constructors gave modules of ``kind``, such as an activation's slopes: no init writes there."""
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


def _family(model: PreTrainedModel, name: str) -> PreTrainedModel:
    """The innermost of transformers' models around the module ``name``."""
    while not isinstance(found := model.get_submodule(name), PreTrainedModel):
        name = name.rpartition(".")[0]
    return found


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """Returns a source of the values in a state dict that has the model's own names."""
    return lambda name: tensors[name].detach()


def part_of(whole: Source, names: Mapping[str, str]) -> Source:
    """Returns a source of a model's part from one of the whole; ``names`` are the whole's, by the part's."""
    return lambda name: whole(names.get(name, name))


def part_and_rest(part: Source, rest: Source, names: Mapping[str, str]) -> Source:
    """Returns a source of a whole model: what ``names`` says is its part's comes from ``part``, the rest from ``rest``.

    Args:
        names: the whole's names, by the part's.
    """
    own = {full: name for name, full in names.items()}
    return lambda name: part(own[name]) if name in own else rest(name)


def has_weights(model: str) -> bool:
    """Whether ``model`` names weights: a hub id does, a folder if weight files lie in it, a config file does not."""
    path = Path(model_path(model))
    if not os.path.exists(path):
        return True
    return path.is_dir() and any(".safetensors" in file.name or file.suffix == ".bin" for file in path.iterdir())
