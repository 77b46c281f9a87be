"""What the host holds while a checkpoint several times its largest parameter is loaded."""

from __future__ import annotations

import pytest

from shardwright.scripts.measure import files
from shardwright.scripts.measure.tables import in_fresh_process

MIB = 1 << 20


@pytest.mark.slow
@pytest.mark.parametrize("form", ["float32", "FP8"])
def test_loading_reads_one_fused_parameter_at_a_time_places_a_few_copies_and_never_the_model(tmp_path, form):
    files.make_checkpoint("mixtral_ep", str(tmp_path), form)
    peaks = {}
    for way in ("read",) if form == "FP8" else ("read", "placed", "whole"):
        peaks[way], largest, total = in_fresh_process(files.load_memory, "mixtral_ep", str(tmp_path), way)
    # what reading takes beside: libraries' own, and what the allocator keeps (no two runs agree)
    assert largest <= peaks["read"] < largest + 64 * MIB
    # further copies are torch_xla's, the (CPU) devices' until they are written into the stack, and the compiler's
    bound = 6 * largest + 64 * MIB
    assert peaks.get("placed", 0) < bound < total / 2
    # by the same measure a loader that holds the whole model is found out
    assert peaks.get("whole", total + 1) > total
