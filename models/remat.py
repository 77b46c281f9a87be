"""Remat policies: each a partitioner, which splits AOTAutograd's joint graph of a layer into forward and backward.

The partitioner decides what the forward saves and what the backward computes again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition

# semi-private: torch/_functorch/config.py, torch 2.9
from torch._functorch import config as functorch_config
from torch.utils.checkpoint import CheckpointPolicy
from torch_xla.experimental import stablehlo_custom_call

from models import jax_call


def _partition_with(policy: Callable[[torch.fx.Node], CheckpointPolicy]) -> Callable[..., Any]:
    """A partitioner that saves exactly the nodes that ``policy`` says to save."""

    def partition(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
        for node in joint.graph.nodes:
            # semi-private: torch/_functorch/partitioners.py, torch 2.9 (the tags of selective checkpointing)
            if node.op == "call_function" and "tangents" not in node.name:
                node.meta["recompute"] = policy(node)
                node.meta["ac_graph_id"] = 0
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)

    return partition


def _recompute_everything(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
    """A partitioner that saves the layer's inputs alone."""
    with functorch_config.patch(activation_memory_budget=0.0):
        return min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)


_MATMULS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


def _save_matmuls(node: torch.fx.Node) -> CheckpointPolicy:
    matmul = getattr(node.target, "overloadpacket", None) in _MATMULS
    return CheckpointPolicy.MUST_SAVE if matmul else CheckpointPolicy.PREFER_RECOMPUTE


def _offload(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
    """A partitioner that saves the layer's inputs alone; on a TPU the hidden state waits in the host's memory."""
    forward, backward = _recompute_everything(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    if jax_call.target() != "tpu":
        return forward, backward
    hidden = next(node for node in forward.graph.nodes if node.op == "placeholder")  # the carry's first tensor
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    kept, saved = output.args[0][:num_fwd_outputs], output.args[0][num_fwd_outputs:]
    # semi-private: `_opoverload` of torch/_library/custom_ops.py, torch 2.9; both operations are torch_xla's
    with forward.graph.inserting_before(output):
        parked = forward.graph.call_function(stablehlo_custom_call.place_to_host._opoverload, (hidden,))
    output.args = ((*kept, *(parked if node is hidden else node for node in saved)),)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if node.name == hidden.name:
            with backward.graph.inserting_after(placeholders[-1]):
                back = backward.graph.call_function(stablehlo_custom_call.place_to_device._opoverload, (node,))
            node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    for graph in (forward, backward):
        graph.recompile()
    return forward, backward


REMAT: dict[str, Callable[..., Any]] = {
    "none": default_partition,
    "full": _recompute_everything,
    "offload": _offload,
    "save_matmuls": _partition_with(_save_matmuls),
}
