"""Shapes and instructions, read from HLO text."""

from __future__ import annotations

import pytest

from shardwright.compile.hlo.text import HBM, HOST, dtype_bits, leaves, parse


def test_shapes_in_vmem_and_on_the_host_are_not_hbm() -> None:
    (vmem, host, hbm) = leaves("(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, f32[4]{0:T(128)S(5)}, pred[3]{0})")
    assert [(leaf.space, leaf.bytes) for leaf in (vmem, host, hbm)] == [(1, 2048), (HOST, 16), (HBM, 3)]


@pytest.mark.parametrize(
    ("dtype", "bits"), [("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("pred", 8), ("token", 0), ("tuple", 0)]
)
def test_a_dtypes_name_tells_how_many_bits_it_takes(dtype: str, bits: int) -> None:
    assert dtype_bits(dtype) == bits


def test_a_line_is_split_at_its_own_parentheses() -> None:
    entry = parse(
        """HloModule one
ENTRY %main (a: f32[8]) -> (f32[8], f32[8]) {
  %a = f32[8]{0:T(8,128)} parameter(0)
  ROOT %pair.1 = (f32[8]{0:T(8,128)}, (f32[8]{0}, s32[])) call-start(%a, %a), to_apply=%f, metadata={op_name="x/y"}
}
%f (b: f32[8]) -> f32[8] {
  ROOT %b = f32[8]{0} parameter(0)
}
"""
    )
    parameter, pair = entry.instructions
    assert (parameter.opcode, parameter.arguments, entry.parameters) == ("parameter", "0", {0: parameter})
    assert (pair.name, pair.opcode, pair.operands) == ("pair.1", "call-start", [parameter, parameter])
    assert (pair.called, pair.op_name, entry.root) == ([entry.module["f"]], "x/y", pair)
    assert list(map(str, pair.leaves)) == ["f32[8]", "f32[8]", "s32[]"]


def test_a_text_without_an_entry_is_refused() -> None:
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse("HloModule none\n")
