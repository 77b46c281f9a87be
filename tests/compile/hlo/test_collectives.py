"""The mesh axes, and the module, that a collective's text names."""

from __future__ import annotations

import pytest

from shardwright.compile.hlo.communication import axes_of_group, module_of, replica_groups


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("replica_groups=[16,4]<=[64]", "expert"),
        ("replica_groups=[4,16]<=[16,4]T(1,0)", "fsdp"),
        ("replica_groups=[1,64]<=[64]", "fsdp×expert"),
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", "expert"),
        ("replica_groups={{0,4,8,12,16,20,24,28,32,36,40,44,48,52,56,60}}", "fsdp"),
        ("replica_groups={{0,1},{2,3}}", "within expert"),
        ("replica_groups=[8,8]<=[2,8,4]T(0,2,1)", "within fsdp"),
        ("channel_id=3", "fsdp×expert"),
    ],
)
def test_groups_are_told_by_the_axes_they_span(text: str, axis: str) -> None:
    mesh = {"fsdp": 16, "expert": 4}
    assert axes_of_group(mesh, replica_groups(text, 64)[0]) == axis


@pytest.mark.parametrize(
    ("op_name", "module"),
    [
        ("jit(step)/transpose(jvp(model.embed_tokens))/scatter-add", "model.embed_tokens"),
        ("jit(step)/jvp()/while/body/closed_call/model.layers.*.mlp.experts/ebsd", "model.layers.*.mlp.experts"),
        ("xla__scan/call.1024/model.layers.*.self_attn/aten__mm", "model.layers.*.self_attn"),
        ("xla__scan/call.6602/aot_backward.195/aten__mm", "aten__mm (backward)"),
        ("xla__scan/call.7/model.layers.*.mlp.experts.12/aten__mm.3/aten__mm", "model.layers.*.mlp.experts"),
        ("xla__scan/while.1137", "xla__scan"),
        ("aten__topk", "aten__topk"),
        ("", ""),
    ],
)
def test_the_module_is_found_in_the_compilers_metadata(op_name: str, module: str) -> None:
    assert module_of(op_name) == module
