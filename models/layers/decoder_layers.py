"""A replacement of a decoder's layer list: layers that repeat run as one scan, and each has remat.

It works for any transformers decoder that calls its layers in a loop, whatever the list is called. In the new list the
layers of a run are one, with parameters stacked along a new dimension 0. Its name is its slice of the old list:
``model.layers.3:61``, ``model.layers.0:24:2``, or ``model.layers.*`` for all; so are the names in a recipe's lines. The
decoder still gets one callable for each layer (:mod:`shardwright.models.layers.layer_run`).
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.models.layers.grouping import Grouping, Repetition, group
from shardwright.models.layers.layer_run import LayerPart, LayerRun, Prepare
from shardwright.models.layers.mtp import trunk_and_behind
from shardwright.models.layers.remat import Value, partitioner
from shardwright.models.ops import randomness


def find_layers(model: nn.Module) -> str:
    """The dotted name of the decoder's layer list: the outermost module list with the most parameters.

    Raises:
        ValueError: the model has no list of modules.
    """
    lists: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists[name] = sum(p.numel() for p in module.parameters())
    if not lists:
        raise ValueError(f"{type(model).__name__} has no list of layers")
    return max(lists, key=lambda name: lists[name])


def stack_layers(model: nn.Module) -> Grouping:
    """Stack the decoder's layers where they repeat, in place. The model must be on meta.

    Raises:
        ValueError: the decoder has no layer list or can't be followed; says why. The model is then unchanged.
    """
    found = group(model, find_layers(model))
    _replace(model, found)
    return found


def wrap_layers(model: nn.Module) -> None:
    """Replace the decoder's layers, in place, by a list that runs them one by one, each with remat.

    Raises:
        ValueError: the model has no list of layers.
    """
    _replace(model, None)


def number_layers(model: nn.Module) -> None:
    """Make each layer of ``model`` draw from a key of its own, as stacked or wrapped layers do."""
    # in a model without a layer list, draws are numbered through the whole model
    with contextlib.suppress(ValueError):
        for index, layer in enumerate(model.get_submodule(find_layers(model)).children()):
            layer.register_forward_pre_hook(lambda *_, index=index: randomness.set_layer(index))
            layer.register_forward_hook(lambda *_: randomness.set_layer(None), always_call=True)


class DecoderLayers(nn.ModuleList):
    """The layer list ``name`` of a decoder, which yields a callable for each of its layers.

    ``behind`` has callables for MTP layers, which the decoder does not run.
    """

    def __init__(
        self, name: str, layers: Sequence[nn.Module], grouping: Grouping | None, behind: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        self.name, self.depth = name, len(layers) + len(behind)
        self.runs: list[LayerRun] = []
        self._callables: list[_Callable] = []
        for run in grouping.runs if grouping else [Repetition(index, 1, 1) for index in range(len(layers))]:
            parts = []
            for j in range(run.period):
                members = layers[run.start + j : run.stop : run.period]
                key = _slice(run, j, self.depth)
                # changes the first layer of the stack
                stacked = _stack(members, grouping) if grouping and run.count > 1 else frozenset()
                self.add_module(key, members[0])
                shape = grouping.seen[run.start + j].shape if grouping else None
                parts.append(LayerPart(f"{name}.{key}", members[0], stacked, shape))
            self.runs.append(LayerRun(parts, run.start, run.count))
            members = layers[run.start : run.stop]
            self._callables += [_Callable(self.runs[-1], offset, layer) for offset, layer in enumerate(members)]
        self.behind: list[_Callable] = []
        for index, layer in enumerate(behind, start=len(layers)):
            self.add_module(str(index), layer)
            self.runs.append(LayerRun([LayerPart(f"{name}.{index}", layer)], index))
            self.behind.append(_Callable(self.runs[-1], 0, layer))

    def configure(self, prepare: Prepare, remat: str | float) -> None:
        """Set the function applied to parameters just before use (a cast, a layout), and the remat policy."""
        for run in self.runs:
            run.prepare, run.partition = prepare, partitioner(remat)

    @property
    def values(self) -> list[tuple[Value, int]]:
        """The values that trained layers could keep for their backward, each with its number of layers."""
        # empty before a step is traced, and under a policy that does not choose among values
        return [(value, run.count) for run in self.runs for value in run.values]

    @property
    def stacks(self) -> list[str]:
        """The names of the children that hold several layers, as slices of the decoder's list."""
        return [part.name.rpartition(".")[2] for run in self.runs for part in run.parts if run.count > 1]

    def __len__(self) -> int:
        return len(self._callables)

    def __getitem__(self, index: Any) -> Any:
        return self._callables[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._callables)


class _Callable:
    """The callable that a decoder's loop takes for ``layer``, whose attributes and class it shows."""

    def __init__(self, run: LayerRun, offset: int, layer: nn.Module) -> None:
        self._run, self._offset, self._layer = run, offset, layer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run.take(self._offset, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        # A copy under construction has no layer yet. Special methods (`__setstate__`, …) are never the layer's.
        if name == "_layer" or name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._layer, name)

    @property  # type: ignore[misc]  # of the same name in `object`, where it can be assigned to
    def __class__(self) -> Any:  # decoders ask `isinstance(layer, …)`
        return type(vars(self)["_layer"]) if "_layer" in vars(self) else _Callable


def _slice(run: Repetition, j: int, depth: int) -> str:
    """The name of the layers j, j + period, … of ``run`` in a list of ``depth``: a number, a slice or ``*``."""
    if run.count == 1:
        return str(run.start + j)
    if run.period == 1 and run.count == depth:
        return "*"
    step = f":{run.period}" if run.period > 1 else ""
    return f"{run.start + j}:{run.stop}{step}"


def _stack(layers: Sequence[nn.Module], grouping: Grouping) -> frozenset[str]:
    """Stack all of ``layers``, which are alike, into the first; return the names of its stacked buffers."""
    first, stacked = layers[0], set()
    for path, module in first.named_modules():
        members = [layer.get_submodule(path) for layer in layers]
        for key, parameter in list(module.named_parameters(recurse=False)):
            shape = (len(layers), *parameter.shape)
            whole = nn.Parameter(torch.empty(shape, dtype=parameter.dtype, device="meta"), parameter.requires_grad)
            setattr(module, key, whole)
        for key in [key for where, key in grouping.floats if where == path and key in vars(module)]:
            values = [vars(member)[key] for member in members]
            if len(set(values)) > 1:
                delattr(module, key)
                module.register_buffer(key, torch.tensor(values, dtype=torch.float32), persistent=False)
                stacked.add(f"{path}.{key}" if path else key)
        saved = module.state_dict().keys()
        for key, buffer in list(module.named_buffers(recurse=False)):
            name = f"{path}.{key}" if path else key
            buffers = [buffer if name in stacked else member.get_buffer(key) for member in members]
            # saved buffers have values of their own in each layer of a checkpoint
            if name not in stacked and (key in saved or any(not _equal(buffer, other) for other in buffers)):
                module._buffers[key] = torch.stack(buffers)
                stacked.add(name)
    return frozenset(stacked)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (not a.is_meta and not b.is_meta and torch.equal(a, b))


def _replace(model: nn.Module, grouping: Grouping | None) -> None:
    name = find_layers(model)
    parent, _, child = name.rpartition(".")
    layers, behind = trunk_and_behind(model.get_submodule(name).children())
    setattr(model.get_submodule(parent), child, DecoderLayers(name, layers, grouping, behind))
