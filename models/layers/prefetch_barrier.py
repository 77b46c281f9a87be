"""A barrier that prepares each layer's weights only once the layer's input is there, for layers that run one by one.

Else a TPU's compiler may gather those of many layers at once where a layer computes little, as in decoding a token.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from shardwright.models.layers.decoder_layers import find_layers
from shardwright.models.layers.layer_run import Prepare


def prepare_in_turn(model: nn.Module, prepare: Prepare) -> frozenset[str]:
    """Make each layer of ``model`` apply ``prepare`` to its own parameters; return their names. For evaluation only.

    Raises:
        ValueError: the model has no list of layers.
    """
    name, inside = find_layers(model), set()
    for index, layer in enumerate(model.get_submodule(name).children()):
        inside |= {f"{name}.{index}.{key}" for key, _ in layer.named_parameters()}
        layer.forward = functools.partial(_run, layer, layer.forward, f"{name}.{index}.", prepare)
    return frozenset(inside)


def _run(
    layer: nn.Module,
    forward: Callable[..., Any],
    prefix: str,
    prepare: Prepare,
    hidden_states: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    weights = dict(layer.named_parameters())
    behind = [torch.ops.aten.view_copy(tensor, tensor.shape) for tensor in (hidden_states, *weights.values())]
    xm.optimization_barrier_(behind)
    hidden_states, *behind = behind
    prepared = prepare({prefix + key: weight for key, weight in zip(weights, behind, strict=True)})
    # semi-private: torch/nn/utils/stateless.py, torch 2.9: `torch.func.functional_call` without the call
    with torch.nn.utils.stateless._reparametrize_module(
        layer, {name.removeprefix(prefix): tensor for name, tensor in prepared.items()}
    ):
        return forward(hidden_states, *args, **kwargs)
