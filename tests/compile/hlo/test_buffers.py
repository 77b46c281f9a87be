"""What is in HBM when it is fullest, from a buffer assignment in XLA's words."""

from __future__ import annotations

import re

from shardwright.compile.hlo.buffers import held_over_time, peak_buffers

# kept.1 waits on the host from 2 to 7, where all memories together are fullest; HBM is so at 9. loop.1, a loop's own
# value, takes the place of made.1, and is the same buffer.
ASSIGNMENT = """BufferAssignment:
allocation 0: size 64, parameter 0, shape |f32[16]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.0 @0> (size=64,offset=0): f32[16]{0:T(128)}
 value: <2 updated.1 @0> (size=64,offset=0): f32[16]{0:T(128)}
allocation 1: size 1024, preallocated-temp:
 value: <3 made.1 @0> (size=512,offset=0): f32[128]{0:T(128)}
 value: <4 loop.1{1} (phi) @0> (size=512,offset=0): f32[128]{0:T(128)}
 value: <5 later.1 @0> (size=256,offset=512): f32[64]{0:T(128)}
 value: <6 early.1 @0> (size=256,offset=512): f32[64]{0:T(128)}
allocation 2: size 4096, color 5, preallocated-temp:
 value: <7 kept.1 @0> (size=4096,offset=0): f32[1024]{0:S(5)}

HloLiveRange (max 12):
  InstructionSequence:
    0:param.0
  BufferLiveRange:
    param.0{}:0-12
    early.1{}:1-7
    kept.1{}:2-7
    made.1{}:8-8
    loop.1{1}:8-11
    later.1{}:9-10
    updated.1{}:11-12
  Live ranges at 5 (peak):
    kept.1{}: 4096 bytes (cumulative: 4096 bytes)
    early.1{}: 256 bytes (cumulative: 4352 bytes)
    param.0{}: 64 bytes (cumulative: 4416 bytes)
"""


def test_the_fullest_moment_is_that_of_hbm_and_a_buffer_counts_once() -> None:
    allocations, _, alive = peak_buffers(ASSIGNMENT).partition("\npeak:\n")
    assert [line.split(":")[0] for line in allocations.splitlines()] == [f"allocation {i}" for i in range(3)]
    found = dict(re.findall(r"^    (\S+): (\d+) bytes$", alive, re.MULTILINE))
    assert held_over_time(peak_buffers(ASSIGNMENT)) == {"early.1": 256, "made.1": 512, "later.1": 768}
    assert found == {"loop.1{1}": "512", "later.1{}": "256", "param.0{}": "64"}


def test_nothing_dumped_is_nothing_alive() -> None:
    assert peak_buffers("") == "peak:"
