"""Where a model's weights come from: a name gives an array."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping

import torch
from transformers import PreTrainedModel

from trainer.arrays import Array

# the model's own (unstacked) parameter or buffer name -> its values, which can be read by slices
Source = Callable[[str], Array]


def seeded_init(model: PreTrainedModel, seed: int) -> Source:
    """The model's own random init, a module at a time, each from a seed of its own.

    So the values depend on neither mesh nor order, and the host holds one module. ``model`` is on meta and stays so.
    """

    def source(name: str) -> torch.Tensor:
        owner, _, key = name.rpartition(".")
        module = copy.deepcopy(model.get_submodule(owner)).to_empty(device="cpu", recurse=False)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(zlib.crc32(f"{seed}/{owner}".encode()))
            model._init_weights(module)
        return getattr(module, key).detach()

    return source


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """The values of a state dict with the model's own names."""
    return lambda name: tensors[name].detach()
