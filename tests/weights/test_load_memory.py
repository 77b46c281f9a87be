"""What the host holds while a checkpoint several times its largest parameter is loaded."""

from __future__ import annotations

import files
import pytest

MIB = 1 << 20


@pytest.mark.slow
def test_loading_holds_a_few_copies_of_the_largest_fused_parameter_and_never_the_model(tmp_path):
    job = {"folder": str(tmp_path), **files.LOAD}
    files.worker("mixtral_ep", {**job, "side": "make checkpoint"})
    ours = files.worker("mixtral_ep", {**job, "side": "load memory"})
    # four copies of a parameter: its shards, torch_xla's copies of them, those of the (CPU) devices until they are
    # written into the stack, and what the allocator keeps; and room for the compiler
    bound = 4 * ours["largest"] + 64 * MIB
    assert ours["total"] > 2 * bound
    assert ours["beyond"] < bound
    # by the same measure a loader that holds the whole model is found out
    whole = files.worker("mixtral_ep", {**job, "side": "load memory", "whole": True})
    assert whole["beyond"] > ours["total"] > bound
