"""Loss spikes: found by a robust threshold on the device, left out or held, in the step's one computation."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

import pytest
import torch
import torch_xla

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.step.spikes import MOST_IN_A_ROW, SpikeWatch, log_entries
from shardwright.xla import sharding
from tests.step.test_step import count, fallbacks
from tests.support.cases import Case, make_batch, make_case, small_config

WINDOW = 6


def limit(values: list[float], threshold: float) -> float:
    middle = statistics.median(values)
    usual = 1.4826 * statistics.median(abs(value - middle) for value in values)
    return middle + threshold * max(usual, 0.01 * abs(middle))


def judged(watch: SpikeWatch, found: Iterable[tuple[float, float]]) -> tuple[list[int], int, torch.Tensor]:
    """Which steps (from 1) with these losses and norms are spikes, which ends the run (0: none), and the state."""
    state, spikes, end = torch.zeros(watch.size), [], 0
    for step, (loss, norm) in enumerate(found, 1):
        values = [torch.tensor(float(value)) for value in (step, loss, norm)]
        spike, ends, state = watch.judged(state, values, torch.tensor(end == 0))
        spikes += [step] if spike else []
        end = end or (step if ends else 0)
    return spikes, end, state


@pytest.mark.parametrize("window", [5, 6])
def test_a_spike_is_what_lies_beyond_the_median_and_median_distance_of_the_last_good_steps(window):
    generator, threshold = torch.Generator().manual_seed(1), 3.0
    found = torch.rand((60, 2), generator=generator) + torch.tensor([2.0, 0.5])
    found[3, 0] = found[20, 0] = found[41, 1] = 9.0  # the first before the window is full
    expected: list[int] = []
    windows: list[list[float]] = [[], []]
    for step, values in enumerate(found.tolist(), 1):
        full = len(windows[0]) >= window
        limits = [limit(kept[-window:], threshold) for kept in windows] if full else []
        if any(value > most for value, most in zip(values, limits, strict=False)):
            expected.append(step)
        else:
            for kept, value in zip(windows, values, strict=True):
                kept.append(value)
    assert {21, 42} <= set(expected)
    watch = SpikeWatch(window, threshold, skips=True)
    spikes, end, state = judged(watch, found.tolist())
    assert (spikes, end) == (expected, 0)
    spike = watch.read(state.tolist())
    assert (spike.step, spike.skipped) == (expected[-1], len(expected))
    assert spike.grad_norm == pytest.approx(found[expected[-1] - 1, 1].item())
    assert log_entries(spike, since=expected[-1]) == {"skipped_steps": len(expected)}


def test_without_skipping_the_first_spike_ends_the_run_and_no_later_step_is_judged():
    watch = SpikeWatch(4, 8.0, skips=False)
    spikes, end, state = judged(watch, [(2, 1)] * 6 + [(3, 1), (2, 1), (9, 9)])
    assert (spikes, end) == ([7], 7)
    spike = watch.read(state.tolist())
    assert (spike.step, spike.loss, spike.loss_limit, spike.skipped) == (7, 3, pytest.approx(2 * 1.08), 0)


def test_a_level_that_rose_for_good_is_not_skipped_for_ever():
    watch = SpikeWatch(4, 8.0, skips=True)
    spikes, end, state = judged(watch, [(2, 1)] * 6 + [(3, 1)] * 10 + [(2, 1)] + [(3, 1)] * 30)
    assert end == 6 + 10 + 1 + MOST_IN_A_ROW
    assert len(spikes) == 10 + MOST_IN_A_ROW
    assert watch.read(state.tolist()).skipped == 10 + MOST_IN_A_ROW - 1


def odd_batch(case: Case) -> dict[str, torch.Tensor]:
    """A batch with three scored tokens: its gradient is that of few, and so larger."""
    batch = make_batch(case.config, seed=99)
    batch["labels"][:, 3:] = -100
    batch["labels"][2:] = -100
    return batch


def state(case: Case) -> dict[str, torch.Tensor]:
    kept = {name: tensor for name, tensor in case.step.state.items() if name != "metrics"}
    return {name: sharding.fetch(tensor.detach()) for name, tensor in kept.items()}


def spiking(policy: str) -> Case:
    # a shape of its own: XLA would remember the step of another test, and no compile would be counted
    config = small_config(load_recipe("llama_fsdp"), intermediate_size=112)
    # an attention that pads no row to a kernel's 128 tokens: a step takes a fifth of the time
    return make_case("llama_fsdp", config, more={"on_spike": policy, "spike_window": WINDOW}, attention="sdpa")


def test_a_skipped_spike_leaves_the_run_that_never_saw_it_in_one_graph_without_a_transfer():
    case, other = spiking("skip"), spiking("skip")
    torch_xla.sync()
    names = ("CompileTime", "ExecuteReplicatedTime", "ExecuteTime", "TransferFromDeviceTime")
    before, on_host = {name: count(name) for name in names}, fallbacks()
    for step in range(1, WINDOW + 3):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-4)
    case.step(odd_batch(case), step=WINDOW + 3, learning_rate=1e-4)
    made = {name: count(name) - value for name, value in before.items()}
    assert (made["CompileTime"], made["TransferFromDeviceTime"]) == (1, 0)
    assert made["ExecuteReplicatedTime"] + made["ExecuteTime"] == WINDOW + 3
    metrics = case.step.read_metrics()
    assert count("TransferFromDeviceTime") - before["TransferFromDeviceTime"] == 1
    assert fallbacks() == on_host
    assert metrics.bad_step == 0
    assert metrics.steps == WINDOW + 3
    assert metrics.spike is not None
    assert (metrics.spike.step, metrics.spike.skipped, metrics.spike.in_a_row) == (WINDOW + 3, 1, 1)
    assert metrics.spike.grad_norm == metrics.grad_norm > metrics.spike.grad_norm_limit
    # weights, moments and AdamW's own count of steps
    case.step(make_batch(case.config, seed=50), step=WINDOW + 4, learning_rate=1e-4)
    for step in range(1, WINDOW + 3):
        other.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-4)
    other.step(make_batch(case.config, seed=50), step=WINDOW + 3, learning_rate=1e-4)
    there = state(other)
    assert all(torch.equal(tensor, there[name]) for name, tensor in state(case).items())
    assert case.step.read_metrics().spike.in_a_row == 0  # type: ignore[union-attr]


def test_a_spike_that_ends_the_run_holds_the_state_of_before_it_until_the_host_hears():
    case = spiking("stop")
    for step in range(1, WINDOW + 2):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-4)
    before = state(case)
    case.step(odd_batch(case), step=WINDOW + 2, learning_rate=1e-4)
    case.step(make_batch(case.config, seed=50), step=WINDOW + 3, learning_rate=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in state(case).items())
    metrics = case.step.read_metrics()
    assert metrics.spike is not None
    assert metrics.bad_step == metrics.spike.step == WINDOW + 2


@pytest.mark.parametrize("options", [{"on_spike": "skp"}, {"spike_threshold": 0}, {"spike_window": 3}])
def test_options_that_find_no_spike_are_refused(options):
    with pytest.raises(UserError, match=f"--{next(iter(options))}"):
        make_case("llama_fsdp", more=options)
