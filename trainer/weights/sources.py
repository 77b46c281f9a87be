"""Sources of a model's weights: a source turns a name into an array."""

from __future__ import annotations

import copy
import zlib
from collections.abc import Callable, Mapping

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
            model._init_weights(module)  # semi-private: transformers/modeling_utils.py, transformers 5.23
        return getattr(module, key).detach()

    return source


def state_dict_weights(tensors: Mapping[str, torch.Tensor]) -> Source:
    """Returns a source of the values in a state dict that has the model's own names."""
    return lambda name: tensors[name].detach()
