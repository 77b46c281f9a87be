"""The loops over stacked layers take the stacks as they are stored, and copy none of them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs import job_of
from tests.support.tpu_compiler import needs_libtpu
from trainer.compile.libtpu import Target, compile_for
from trainer.compile.lowering import lower
from trainer.layout.load import load_recipe
from trainer.step import build

SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS, EXPERTS = 8, 8


@pytest.mark.slow
@needs_libtpu
def test_no_loop_copies_all_layers_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Left to itself, the compiler transposes them before the first loop and keeps both copies."""
    recipe = load_recipe("mixtral_ep")
    shape = {**SIZES, "num_hidden_layers": LAYERS, "num_local_experts": EXPERTS, "vocab_size": 256}
    recipe = replace(
        recipe,
        model={**(recipe.model or {}), **shape},
        compute=replace(recipe.compute, experts="capacity"),
    )
    bf16 = {"weight_dtype": "bfloat16", "optimizer_dtype": "bfloat16"}
    job = job_of(recipe, sequence_length=512, **bf16)
    target = Target("v5e:2x4", timeout=900)
    ours = compile_for(lower(job), target, cache_dir=tmp_path)
    monkeypatch.setattr(build, "as_stored", lambda weight, *_: weight)
    theirs = compile_for(lower(job), target, cache_dir=tmp_path)
    experts = LAYERS * EXPERTS * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 2 // 8  # bytes a chip
    assert ours.temp_bytes < theirs.temp_bytes - experts // 2
    sent = [sum(line.wire_bytes for line in report.collectives) for report in (ours, theirs)]
    assert sent[0] == sent[1]
    assert ours.flops == theirs.flops
