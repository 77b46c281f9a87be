"""The step that is compiled for an adapter: the frozen model goes in and does not come out, and has no state."""

from __future__ import annotations

import pytest
from rich.console import Console
from transformers import TrainerState

from shardwright.compile.lowering import lower
from shardwright.models.adapters.lora import base_of
from shardwright.monitoring import log
from shardwright.xla.chips import CHIPS
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


def test_a_frozen_weight_costs_two_products_of_three_in_the_compiled_step_and_in_the_log(monkeypatch):
    monkeypatch.setattr(log, "chip", lambda: CHIPS["v5e"])
    plain, adapted = job_of("llama_fsdp", sequence_length=2), job_of("llama_fsdp", lora_r=1, sequence_length=2)
    flops = [job.training_flops(2) for job in (plain, adapted)]
    assert 0.66 < flops[1] / flops[0] < 0.70
    logs = [log.RunLog(job, None, TrainerState(), None, Console(quiet=True), print) for job in (plain, adapted)]
    for each in logs:
        each.stepped(2)
    assert [sum(each._least) for each in logs] == pytest.approx([n / (8 * CHIPS["v5e"].flops) for n in flops])
