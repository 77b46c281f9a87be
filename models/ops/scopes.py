"""Module names in XLA's reports and profiles, such as ``model.layers.*.mlp`` for an operation.

A torch operation gets the name of the scope that is open when it runs: :func:`annotate` opens one around each module's
forward. A scanned layer runs as two graphs that AOTAutograd has traced, whose nodes remember their module (in the
backward: that of the forward operation whose gradient they compute); :func:`insert_scopes` makes the graphs open and
close scopes. XLA keeps the names of operations that run inside :func:`kept`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch_xla

# semi-private: torch/fx/traceback.py, torch 2.9 (the node metadata that AOTAutograd copies to the gradient's nodes)
from torch.fx import traceback
from torch.fx.node import has_side_effect

# metadata keys: a node's own module, and on a backward node the forward operation's module
_FORWARD, _BACKWARD = "nn_module_stack", "fwd_nn_module_stack"
# XLA's open scopes, each with the node metadata that it replaced
_open: list[tuple[Any, Any]] = []


@has_side_effect
def enter(name: str) -> None:
    """Open a scope: later operations get ``name``."""
    # semi-private: torch_xla/debug/profiler.py, torch_xla 2.9
    _open.append((torch_xla._XLAC.profiler.scope_pusher(name), traceback.current_meta.get(_FORWARD)))
    traceback.current_meta[_FORWARD] = {name: (name, torch.nn.Module)}


@has_side_effect
def leave() -> None:
    """Close the innermost scope."""
    pusher, before = _open.pop()
    del pusher
    if before is None:
        traceback.current_meta.pop(_FORWARD, None)
    else:
        traceback.current_meta[_FORWARD] = before


@contextlib.contextmanager
def scope(name: str) -> Iterator[None]:
    """Inside, operations get ``name``."""
    enter(name)
    try:
        yield
    finally:
        leave()


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """Inside, operations keep their names; torch_xla's environment variable does so only if set before its import."""
    # semi-private: torch_xla/csrc/init_python_bindings.cpp, torch_xla 2.9
    before = torch_xla._XLAC._get_ir_debug()
    torch_xla._XLAC._set_ir_debug(True)
    try:
        yield
    finally:
        torch_xla._XLAC._set_ir_debug(before)


def annotate(model: torch.nn.Module) -> None:
    """Make every module of ``model`` open a scope with its own dotted name around its forward."""
    for name, module in model.named_modules():
        if name:
            module.register_forward_pre_hook(lambda *_, name=name: enter(name), prepend=True)
            module.register_forward_hook(lambda *_: leave(), always_call=True)


@contextlib.contextmanager
def tracing() -> Iterator[None]:
    """Wraps AOTAutograd's tracing of a layer: inside, nodes remember the layer's modules, and no module around it."""
    with traceback.preserve_node_meta():
        traceback.current_meta.pop(_FORWARD, None)
        yield


def insert_scopes(module: torch.fx.GraphModule) -> None:
    """Make a graph that AOTAutograd has traced open and close its operations' scopes."""
    graph, current = module.graph, ""
    for node in list(graph.nodes):
        stack = node.meta.get(_FORWARD) or node.meta.get(_BACKWARD) or {}
        # an operation of no module (a cast, a sum of two gradients) stays in the scope that is open
        name = current if node.op == "call_function" and not stack else next(reversed(stack), "")
        if name != current and node.op != "placeholder":
            with graph.inserting_before(node):
                if current:
                    graph.call_function(leave)
                if name:
                    graph.call_function(enter, (name,))
            current = name
    module.recompile()
