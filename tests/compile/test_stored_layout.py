"""The loops over stacked layers take the stacks as they are stored, and copy none of them."""

from __future__ import annotations

import gzip
import re
from dataclasses import replace
from pathlib import Path

import pytest

from shardwright.compile.libtpu import CompileTarget, compile_for
from shardwright.compile.lowering import lower
from shardwright.layout.load_recipe import load_recipe
from shardwright.models.ops.stored_layout import stored_order
from shardwright.step import prepare_parameters
from tests.support.jobs import job_of
from tests.support.tpu_compiler import needs_libtpu

# a chip's share of `down_proj` is stored the other way round, for half of 1088 columns would be padded to 640
SIZES = {"hidden_size": 1024, "intermediate_size": 1088, "num_attention_heads": 8, "num_key_value_heads": 8}
LAYERS, EXPERTS = 8, 8
ITEMSIZE = {"bf16": 2, "f32": 4, "s8": 1, "s32": 4, "u32": 4, "s64": 4}  # a TPU has pairs of words for 64 bits


@pytest.mark.parametrize(
    ("shape", "itemsize", "order"),
    [
        # each as libtpu 0.0.21 stores it
        ((32, 2, 28672, 4096), 2, (0, 1, 2, 3)),
        ((18, 32, 2880, 1440), 2, (0, 1, 3, 2)),  # GPT-OSS
        ((89, 40, 5120, 192), 2, (0, 1, 3, 2)),  # GLM-4.5
        ((89, 160, 80), 2, (1, 2, 0)),  # values of all layers in a tile
        ((12, 1, 2048), 2, (1, 0, 2)),
        ((12, 8192, 1, 4), 2, (0, 2, 3, 1)),
        ((32, 4096, 1), 4, (0, 2, 1)),
        ((8000, 4096), 4, (0, 1)),
    ],
    ids=str,
)
def test_that_order_is_stored_which_pads_least(shape: tuple[int, ...], itemsize: int, order: tuple[int, ...]) -> None:
    assert stored_order(shape, itemsize) == order


def _entry(folder: Path) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """(dtype, shape, order) of each argument of the step in ``folder`` that has dimensions, as it was compiled."""
    (path,) = folder.glob("compiled/*/optimised.hlo.gz")
    with gzip.open(path, "rt") as text:
        found = re.search(r"entry_computation_layout=\{\((.*?)\)->", text.readline())
    assert found is not None
    return [
        (kind, tuple(map(int, sizes.split(","))), tuple(map(int, reversed(minor.split(",")))))
        for kind, sizes, minor in re.findall(r"(\w+)\[([\d,]+)\]\{([\d,]+)[:}]", found[1])
    ]


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
    target = CompileTarget("v5e:2x4", timeout=900)
    ours = compile_for(lower(job), target, cache_dir=tmp_path / "ours")
    monkeypatch.setattr(prepare_parameters, "as_stored", lambda weight, *_: weight)
    theirs = compile_for(lower(job), target, cache_dir=tmp_path / "theirs")

    stored = _entry(tmp_path / "ours")
    assert [(kind, sizes, stored_order(sizes, ITEMSIZE[kind])) for kind, sizes, _ in stored if len(sizes) > 1] == [
        entry for entry in stored if len(entry[1]) > 1
    ]
    assert {order for _, sizes, order in stored if len(sizes) == 4} == {(0, 1, 2, 3), (0, 1, 3, 2)}

    experts = LAYERS * EXPERTS * 3 * SIZES["hidden_size"] * SIZES["intermediate_size"] * 2 // 8  # bytes a chip
    assert ours.temp_bytes < theirs.temp_bytes - experts // 2
    # of a stack: what a layer's own values are copied to is less
    copies = [
        [b for b in report.largest_buffers if "copy" in b.name and "experts" in b.module and b.bytes > experts // 6]
        for report in (ours, theirs)
    ]
    assert not copies[0]
    assert copies[1]
    sent = [sum(line.wire_bytes for line in report.collectives) for report in (ours, theirs)]
    assert sent[0] == sent[1]
    assert ours.flops == theirs.flops
