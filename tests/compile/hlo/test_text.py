"""Shapes and instructions, read from HLO text."""

from __future__ import annotations

from trainer.compile.hlo.text import leaves


def test_shapes_in_vmem_and_on_the_host_are_not_hbm() -> None:
    (vmem, host, hbm) = leaves("(bf16[8,128]{1,0:T(8,128)(2,1)S(1)}, f32[4]{0:T(128)S(5)}, pred[3]{0})")
    assert (vmem.hbm_bytes, host.hbm_bytes, host.host_bytes, hbm.hbm_bytes) == (0, 0, 16, 3)
