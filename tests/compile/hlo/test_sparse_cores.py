"""Collectives on the sparse cores, as libtpu 0.0.52 writes them for tpu7x."""

from __future__ import annotations

from tests.support.captured import counted

MODULE = """HloModule sparse
%inside (p: bf16[256,128]) -> bf16[2048,128] {
  %p = bf16[256,128]{1,0} parameter(0)
  ROOT %gather = bf16[2048,128]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}, execution_thread="sparsecore"

%wrapped (q: bf16[256,128]) -> bf16[2048,128] {
  %q = bf16[256,128]{1,0} parameter(0)
  ROOT %call = bf16[2048,128]{1,0} custom-call(%q), custom_call_target="any", called_computations={%inside}
}, execution_thread="sparsecore"

ENTRY %main (a: bf16[256,128], b: bf16[8192,8192]) -> bf16[2048,128] {
  %a = bf16[256,128]{1,0} parameter(0)
  %b = bf16[8192,8192]{1,0} parameter(1)
  %start = ((bf16[256,128]{1,0}), bf16[2048,128]{1,0}, u32[]{:S(2)}) async-start(%a), calls=%wrapped
  %update = ((bf16[256,128]{1,0}), bf16[2048,128]{1,0}, u32[]{:S(2)}) async-update(%start)
  %work = bf16[8192,8192]{1,0} copy(%b), backend_config={"estimated_cycles":"1000000"}
  ROOT %done = bf16[2048,128]{1,0} async-done(%update)
}
"""


def test_a_gather_on_the_sparse_cores_is_counted_and_hidden_by_the_work_until_it_is_awaited() -> None:
    ((key, traffic),) = counted(MODULE, {"fsdp": 8}, topology="tpu7x:2x2x1").collectives.items()
    assert (key.kind, key.axis) == ("all-gather", "fsdp")
    assert (traffic.wire_bytes, traffic.exposed_bytes) == (2 * 2048 * 128 * 7 / 8, 0)
