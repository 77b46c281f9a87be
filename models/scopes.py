"""Which module an operation belongs to, told to XLA: its reports and profiles then speak of ``model.layers.*.mlp``.

Torch operations take the scope that is open when they run (:func:`annotate` opens one around each module's forward).
A scanned layer runs as two graphs that AOTAutograd has traced; there a node remembers its module, in the backward
that of the forward operation it is the gradient of, and :func:`scoped` has the graph open and close scopes itself.
XLA keeps the names where ``XLA_HLO_DEBUG=1`` is set before torch_xla is imported, and forgets them elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch_xla

# Semi-private: the node metadata that AOTAutograd copies from an operation to its gradient (torch 2.9).
from torch.fx import traceback
from torch.fx.node import has_side_effect

_FORWARD, _BACKWARD = "nn_module_stack", "fwd_nn_module_stack"
# XLA's open scopes, and what the node metadata said before each
_open: list[tuple[Any, Any]] = []


@has_side_effect
def enter(name: str) -> None:
    """Open a scope: what is computed from here on belongs to ``name``."""
    _open.append((torch_xla._XLAC.profiler.scope_pusher(name), traceback.current_meta.get(_FORWARD)))
    traceback.current_meta[_FORWARD] = {name: (name, torch.nn.Module)}


@has_side_effect
def leave() -> None:
    """Close the scope opened last."""
    pusher, before = _open.pop()
    del pusher
    if before is None:
        traceback.current_meta.pop(_FORWARD, None)
    else:
        traceback.current_meta[_FORWARD] = before


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    enter(name)
    try:
        yield
    finally:
        leave()


def annotate(model: torch.nn.Module) -> None:
    """Have every module of ``model`` open a scope of its own dotted name around its forward."""
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: enter(name), prepend=True)
            module.register_forward_hook(lambda *_: leave(), always_call=True)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Around AOTAutograd's tracing of a layer: nodes remember their modules, not those that the layer is called in."""
    with traceback.preserve_node_meta():
        traceback.current_meta.pop(_FORWARD, None)
        yield


def scoped(partition: Callable[..., Any]) -> Callable[..., Any]:
    """A partitioner of AOTAutograd's joint graph whose two graphs open and close the scopes that their nodes name."""

    def run(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        graphs = partition(joint, *args, **kwargs)
        for graph in graphs:
            _insert_scopes(graph)
        return graphs

    return run


def _insert_scopes(module: torch.fx.GraphModule) -> None:
    graph, current = module.graph, ""
    for node in list(graph.nodes):
        stack = node.meta.get(_FORWARD) or node.meta.get(_BACKWARD) or {}
        # an operation of no module (a cast, a sum of two gradients) stays where it stands
        name = current if node.op == "call_function" and not stack else next(reversed(stack), "")
        if name != current and node.op != "placeholder":
            with graph.inserting_before(node):
                if current:
                    graph.call_function(leave)
                if name:
                    graph.call_function(enter, (name,))
            current = name
    module.recompile()
