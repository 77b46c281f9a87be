"""Sources of a model's weights: a source turns a name into an array."""

from __future__ import annotations

import copy
import os
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trainer.arrays import Array

# the model's own (unstacked) name of a parameter or buffer -> its values
Source = Callable[[str], Array]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """Returns a source of the model's own random init, which makes one module at a time, each from its own seed.

    So the values depend on neither the mesh nor the order of reading, and the host holds one module at a time.
    ``model`` is on meta and stays there.
    """

    def source(name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{owner}".encode()))
            # each part of a multimodal model knows its own modules
            _family(model, owner)._init_weights(
                module
            )  # semi-private: transformers/modeling_utils.py, transformers 5.23
        return getattr(module, key).detach()

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
    path = Path(model)
    if not os.path.exists(path):
        return True
    return path.is_dir() and any(".safetensors" in file.name or file.suffix == ".bin" for file in path.iterdir())
