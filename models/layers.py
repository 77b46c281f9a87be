"""A decoder's layer list, replaced by one whose layers are stored stacked and run as one, or run with remat.

It works for any transformers decoder whose loop is over ``self.layers``. The new list holds its layers' first under the
name ``*``, with parameters stacked along a new dimension 0. So ``named_parameters()`` yields the names that a recipe's
lines have, ``model.layers.*.self_attn.q_proj.weight``. When the decoder iterates over the list, it gets a single
callable that runs all layers (:mod:`models.scan`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from models import randomness
from models.remat import REMAT
from models.scan import LayerRunner, Prepare


def find_layers(model: nn.Module) -> str:
    """The dotted name of the decoder's layer list; ValueError if the model has none."""
    names = [n for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and n.split(".")[-1] == "layers"]
    if not names:
        raise ValueError(f"{type(model).__name__} has no module list named 'layers'")
    return min(names, key=lambda name: name.count("."))


def stack_layers(model: nn.Module) -> tuple[str, int]:
    """Replace the decoder's layers by one stacked layer, in place. The model must be on meta.

    Returns:
        the layer list's dotted name and the number of layers.

    Raises:
        ValueError: the model has no layer list, its layers differ (says in what), or they have buffers that are saved
            (names one). The model is then as it was.
    """
    name = find_layers(model)
    layers = model.get_submodule(name)
    assert isinstance(layers, nn.ModuleList)
    _check_equal(name, layers)
    _check_buffers(name, layers)
    template = layers[0]
    for module in template.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            stacked = torch.empty((len(layers), *parameter.shape), dtype=parameter.dtype, device="meta")
            setattr(module, key, nn.Parameter(stacked))
    _replace(model, name, DecoderLayers(name, {"*": template}, count=len(layers)))
    return name, len(layers)


def wrap_layers(model: nn.Module) -> None:
    """Replace the decoder's layers, in place, by a list that runs them one by one, each with remat."""
    name = find_layers(model)
    _replace(model, name, DecoderLayers(name, dict(model.get_submodule(name).named_children()), count=None))


def number_layers(model: nn.Module) -> None:
    """Have each layer of ``model`` draw from a key of its own, as layers that are stacked or wrapped do.

    In a model without a layer list, draws are numbered through the whole model.
    """
    with contextlib.suppress(ValueError):
        layers = model.get_submodule(find_layers(model))
        assert isinstance(layers, nn.ModuleList)
        for index, layer in enumerate(layers):
            layer.register_forward_pre_hook(lambda *_, index=index: randomness.enter_layer(index))
            layer.register_forward_hook(lambda *_: randomness.leave_layer(), always_call=True)


class DecoderLayers(nn.ModuleList):
    """The layer list of a decoder, which yields callables that run its layers.

    Args:
        name: the list's dotted name in the model.
        layers: child name -> layer; a stack has the one child ``*``.
        count: how many layers the stack has; None: the layers are not stacked.
    """

    def __init__(self, name: str, layers: dict[str, nn.Module], count: int | None) -> None:
        super().__init__()
        for key, layer in layers.items():
            self.add_module(key, layer)
        self.name, self.count = name, count
        self.runners = [
            LayerRunner(f"{name}.{key}", layer, count, first) for first, (key, layer) in enumerate(layers.items())
        ]

    def configure(self, prepare: Prepare, remat: str) -> None:
        """Set what is done to a parameter just before it is used (a cast, a layout), and the remat policy."""
        for runner in self.runners:
            runner.prepare, runner.partition = prepare, REMAT[remat]

    def __getitem__(self, index: Any) -> Any:
        return self.runners[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.runners)


def _check_equal(name: str, layers: nn.ModuleList) -> None:
    """Raise ValueError unless all layers have the same modules, shapes and settings."""
    first, *others = ([*_signature(layer)] for layer in layers)
    for i, other in enumerate(others, start=1):
        for mine, theirs in zip(first, other, strict=False):
            if mine != theirs:
                raise ValueError(f"{name}.0 has {mine}, {name}.{i} has {theirs}")
        if len(first) != len(other):
            raise ValueError(f"{name}.0 has {len(first)} settings and parameters, {name}.{i} has {len(other)}")


def _signature(layer: nn.Module) -> Iterator[str]:
    """One line for each module, setting and parameter of a layer."""
    for name, module in layer.named_modules():
        yield f"{name or 'the layer'}: {type(module).__name__}"
        for key, value in sorted(vars(module).items()):
            if isinstance(value, bool | int | float | str) and key != "layer_idx":
                yield f"{name}.{key} = {value!r}"
        for key, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{key} of shape {list(parameter.shape)}, {parameter.dtype}"


def _check_buffers(name: str, layers: nn.ModuleList) -> None:
    """Raise ValueError if a layer has buffers that are saved: only parameters are stacked."""
    for i, layer in enumerate(layers):
        saved = layer.state_dict().keys()
        for buffer, _ in layer.named_buffers():
            if buffer in saved:
                raise ValueError(
                    f"{name}.{i} has the buffer {buffer}, which is part of a checkpoint, with values of its own in "
                    "each layer; only parameters are stacked"
                )


def _replace(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)
