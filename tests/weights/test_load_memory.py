"""What the host holds while a checkpoint several times its largest parameter is loaded."""

from __future__ import annotations

import pytest

from shardwright.scripts.measure import files
from shardwright.scripts.measure.tables import in_fresh_process

MIB = 1 << 20


@pytest.mark.slow
def test_loading_holds_a_few_copies_of_the_largest_fused_parameter_and_never_the_model(tmp_path):
    folder = str(tmp_path)
    files.make_checkpoint("mixtral_ep", folder)
    beyond, largest, total = in_fresh_process(files.load_memory, "mixtral_ep", folder)
    # some copies of a parameter: its shards, torch_xla's copies of them, those of the (CPU) devices until they are
    # written into the stack, and what the allocator keeps (no two runs agree); and room for the compiler
    bound = 6 * largest + 64 * MIB
    assert total > 2 * bound
    assert beyond < bound
    # by the same measure a loader that holds the whole model is found out
    assert in_fresh_process(files.load_memory, "mixtral_ep", folder, True)[0] > total > bound
