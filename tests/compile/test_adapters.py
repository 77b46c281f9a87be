"""The step that is compiled for an adapter: the frozen model goes in and does not come out, and has no state."""

from __future__ import annotations

import pytest

from shardwright.compile.lowering import lower
from shardwright.models.adapters.lora import base_of
from tests.support.jobs import job_of


@pytest.mark.parametrize("accumulation", [1, 2])
def test_only_factors_have_moments_and_are_replaced(accumulation):
    job = job_of("llama_fsdp", lora_r=4, gradient_accumulation_steps=accumulation, sequence_length=64)
    step = lower(job, platform="cpu")
    kinds = {kind: [a for a in step.arguments if a.kind == kind] for kind in ("weights", "optimizer")}
    factors = [a for a in kinds["weights"] if base_of(a.name) is not None]
    frozen = [a for a in kinds["weights"] if base_of(a.name) is None]
    assert {a.name for a in frozen} == job.untrained
    assert {a.dtype for a in frozen} == {"bfloat16"}
    assert all(a.output is None for a in frozen)
    assert all(a.output is not None for a in (*factors, *kinds["optimizer"]))
    assert len(kinds["optimizer"]) == 2 * len(factors)


def test_a_frozen_weight_costs_two_products_of_three():
    plain, adapted = job_of("llama_fsdp"), job_of("llama_fsdp", lora_r=1)
    flops = [job.facts.training_flops(1, 2, job.lora) for job in (plain, adapted)]
    assert 0.66 < flops[1] / flops[0] < 0.70
