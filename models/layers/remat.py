"""Remat policies: partitioners that split AOTAutograd's joint graph of a layer into forward and backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import default_partition, min_cut_rematerialization_partition

# semi-private: torch/_functorch/config.py, torch 2.9
from torch._functorch import config as functorch_config
from torch.utils import flop_counter
from torch.utils.checkpoint import CheckpointPolicy

from shardwright.models.ops.device_kernels import kernels

VALUES = "values"  # key in the `meta` of a split layer's forward


def _saving(chosen: Callable[[torch.fx.Node], bool]) -> Callable[..., Any]:
    """A partitioner that saves exactly the nodes that are ``chosen``."""

    def partition(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        for node in joint.graph.nodes:
            # semi-private: torch/_functorch/partitioners.py, torch 2.9 (the tags of selective checkpointing)
            if node.op == "call_function" and "tangents" not in node.name:
                kept = CheckpointPolicy.MUST_SAVE if chosen(node) else CheckpointPolicy.PREFER_RECOMPUTE
                node.meta |= {"recompute": kept, "ac_graph_id": 0}
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    return partition


@dataclass(frozen=True)
class Value:
    """A value of a layer's forward that the backward uses: the result of a matrix product or a kernel."""

    module: str  # its module, as ``model.layers.*.self_attn.q_proj``
    kind: str  # the operation, as ``mm`` or ``attention``
    shape: tuple[int, ...]  # of its largest result
    bytes: int  # of all its results, on all devices together
    flops: int  # the cost of computing it again
    kept: bool = False  # from the forward; else it is computed again


def _values(joint: torch.fx.GraphModule) -> dict[torch.fx.Node, Value]:
    """The values of a joint graph that can be kept, in its order."""
    backward: set[torch.fx.Node] = set()  # nodes computed from the outputs' gradients
    for node in joint.graph.nodes:
        if "tangents" in node.name or any(source in backward for source in node.all_input_nodes):
            backward.add(node)
    used = set(backward)  # and the forward's nodes that these need
    for node in reversed(joint.graph.nodes):
        if any(user in used and user.op != "output" for user in node.users):
            used.add(node)
    found = {}
    for node in joint.graph.nodes:
        # semi-private: `flop_registry` of torch/utils/flop_counter.py, torch 2.9; our kernels are entered there too
        count = flop_counter.flop_registry.get(getattr(node.target, "overloadpacket", None))
        if count is not None and node in used and node not in backward:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
            tensors = node.meta["val"] if _is_many(node) else [node.meta["val"]]
            found[node] = Value(
                module=next(reversed(node.meta.get("nn_module_stack") or {}), ""),
                kind=node.target.overloadpacket.__name__,
                shape=tuple(max(tensors, key=torch.Tensor.numel).shape),
                bytes=sum(t.numel() * t.element_size() for t in tensors),
                flops=count(*args, **kwargs, out_val=node.meta["val"]),
            )
    return found


@dataclass(frozen=True)
class Keep:
    """A partitioner that keeps ``share`` of the bytes of all values, those with the most FLOPs a byte first."""

    share: float

    def __call__(self, joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        values = _values(joint)
        room = self.share * sum(value.bytes for value in values.values())
        chosen: set[torch.fx.Node] = set()
        for node, value in sorted(values.items(), key=lambda item: item[1].flops / item[1].bytes, reverse=True):
            if value.bytes <= room:
                room -= value.bytes
                chosen.add(node)
        # several results of one operation can be kept, but the partitioner asks the operation
        saved = chosen | {user for node in chosen if _is_many(node) for user in node.users}
        split = _saving(saved.__contains__) if chosen else _recompute_everything
        forward, backward = split(joint, inputs, **kwargs)
        # all values, in the layer's order
        forward.meta[VALUES] = tuple(replace(value, kept=node in chosen) for node, value in values.items())
        return forward, backward


def _is_many(node: torch.fx.Node) -> bool:
    return isinstance(node.meta["val"], tuple | list)


def _recompute_everything(joint: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
    """A partitioner that saves only the layer's inputs."""
    with functorch_config.patch(activation_memory_budget=0.0):
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)


_MATMULS = {torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm}


def _offload(joint: torch.fx.GraphModule, inputs: Any, *, num_fwd_outputs: int, **kwargs: Any) -> Any:
    """A partitioner that saves only the layer's inputs, and moves the hidden state to the host's memory."""
    forward, backward = _recompute_everything(joint, inputs, num_fwd_outputs=num_fwd_outputs, **kwargs)
    hidden = next(node for node in forward.graph.nodes if node.op == "placeholder")  # the carry's first tensor
    (output,) = (node for node in forward.graph.nodes if node.op == "output")
    kept, saved = output.args[0][:num_fwd_outputs], output.args[0][num_fwd_outputs:]
    with forward.graph.inserting_before(output):
        parked = forward.graph.call_function(kernels().TO_HOST, (hidden,))
    output.args = ((*kept, *(parked if node is hidden else node for node in saved)),)
    placeholders = [node for node in backward.graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        if node.name == hidden.name:
            with backward.graph.inserting_after(placeholders[-1]):
                back = backward.graph.call_function(kernels().TO_DEVICE, (node,))
            node.replace_all_uses_with(back, delete_user_cb=lambda user, back=back: user is not back)
    for graph in (forward, backward):
        graph.recompile()
    return forward, backward


REMAT: dict[str, Callable[..., Any]] = {
    "none": default_partition,
    "full": _recompute_everything,
    "auto": _recompute_everything,  # until a share is found
    "offload": _offload,
    "save_matmuls": _saving(lambda node: getattr(node.target, "overloadpacket", None) in _MATMULS),
}


def partitioner(remat: str | float) -> Callable[..., Any]:
    """The partitioner of a policy: a name in :data:`REMAT`, or the share of all values to keep (:class:`Keep`)."""
    return REMAT[remat] if isinstance(remat, str) else Keep(remat)
