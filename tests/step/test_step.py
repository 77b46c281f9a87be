"""One graph a step, compiled once; state sharded; a loss that is not finite changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch_xla
import torch_xla.core.xla_model as xm
import torch_xla.debug.metrics as met

from shardwright.errors import UserError
from shardwright.layout.load_recipe import load_recipe
from shardwright.layout.mesh import Mesh
from shardwright.layout.partition import partition_spec
from shardwright.step.router_load import Routing
from shardwright.step.spikes import SpikeWatch
from shardwright.step.step_metrics import MetricsLayout
from shardwright.xla import sharding
from shardwright.xla.runtime import run_now
from tests.support.cases import PLAIN_LAYERS, make_batch, make_case, one_layer, small_config


def count(metric: str) -> int:
    xm.wait_device_ops()  # an execution is counted when its thread ends
    return (met.metric_data(metric) or (0,))[0]


def fallbacks() -> dict[str, int]:
    """How often this process has run an operation on the host because XLA has none such."""
    names = (name for name in met.counter_names() if name.startswith("aten::"))
    return {name: met.counter_value(name) for name in names if "_local_scalar_dense" not in name}


@pytest.fixture(scope="module")
def case():
    # a shape of its own: XLA would remember the step of another test, and no compile would be counted
    return make_case("mixtral_ep", small_config(load_recipe("mixtral_ep"), intermediate_size=96))


def test_many_steps_are_one_compile_as_many_executions_and_no_transfer_but_on_logging_steps(case):
    torch_xla.sync()
    before = {
        name: count(name) for name in ("CompileTime", "ExecuteReplicatedTime", "ExecuteTime", "TransferFromDeviceTime")
    }
    on_host = fallbacks()
    for step in range(1, 10):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-3 / step)
        if step % 3 == 0:
            case.step.read_metrics()
    made = {name: count(name) - value for name, value in before.items()}
    assert made["CompileTime"] == 1
    assert made["ExecuteReplicatedTime"] + made["ExecuteTime"] == 9
    assert made["TransferFromDeviceTime"] == 3
    assert fallbacks() == on_host


def test_a_lazy_tensor_that_garbage_keeps_alive_is_no_part_of_the_step(case):
    case.step(make_batch(case.config), step=1, learning_rate=1e-3)
    compiles = count("CompileTime")
    kept = torch.ones(3, device="xla") * 2
    case.step(make_batch(case.config), step=2, learning_rate=1e-3)
    assert count("CompileTime") == compiles
    assert kept.sum().item() == 6


def test_optimizer_state_is_sharded_as_its_parameter_is_before_and_after_a_step(case):
    case.step(make_batch(case.config), step=1, learning_rate=1e-3)
    for entry in case.plan.parameters:
        spec = partition_spec(entry.layout, len(entry.shape), tuple(case.plan.mesh))
        tensors = (case.step.parameters[entry.name], *case.step.moments[entry.name])
        for tensor in tensors:
            sharding.check_placed({entry.name: tensor}, case.mesh, {entry.name: spec})


def test_a_later_batch_of_another_shape_is_refused_by_name_before_it_compiles(case):
    case.step(make_batch(case.config), step=1, learning_rate=1e-3)
    batch = make_batch(case.config)
    batch["labels"] = batch["labels"][:, :-2]
    compiles = count("CompileTime")
    with pytest.raises(UserError, match=r"'labels' is: shape \[16, 14\]"):
        case.step(batch, step=2, learning_rate=1e-3)
    assert count("CompileTime") == compiles


def test_metrics_are_means_since_the_last_reading(case):
    case.step.read_metrics()
    losses = []
    for step in (1, 2, 3):
        batch = make_batch(case.config, seed=step)
        losses.append(case.gradients(batch)[0])
        case.step(batch, step=step, learning_rate=1e-12)
    metrics = case.step.read_metrics()
    assert metrics.steps == 3
    assert metrics.loss == pytest.approx(sum(losses) / 3, rel=1e-5)
    assert metrics.dropped_fraction is None, "it has no capacity"
    assert metrics.bad_step == 0


@pytest.mark.parametrize(("saved", "own"), [((), ("z_loss",)), (("z_loss",), ()), (("z_loss",), ("z_loss",))])
def test_saved_metrics_keep_their_names_where_other_values_are_logged(saved, own):
    routing, watch = Routing(Mesh(fsdp=-1), {"experts": 2}, {}, None), SpikeWatch(4, 8.0, skips=True)
    then, now = MetricsLayout(saved, routing, watch), MetricsLayout(own, routing, watch)
    values = torch.arange(1.0, then.size + 1)
    started = now.start(lambda _: values, saved)
    for name, slot in now.slots.items():
        found = values[then.slots[name]] if name in then.slots else torch.zeros(1)
        assert name == "gathered" or torch.equal(started[slot], found), name
    # nobody looks for spikes; and an older version counted neither spikes nor steps without a scored token
    for size in (then.slots["spikes"].start, then.slots["unscored_steps"].start):
        started = now.start(lambda _, kept=values[:size]: kept, saved)
        assert torch.equal(started[now.slots["expert_shares"]], values[then.slots["expert_shares"]])
        assert not started[now.slots["spikes"]].any()
    assert not started[now.slots["unscored_steps"]].any()


def test_a_loss_that_is_not_finite_changes_no_weight_and_no_moment_and_names_the_first_such_step():
    case = make_case("llama_fsdp", one_layer("llama_fsdp"), **PLAIN_LAYERS)
    case.step(make_batch(case.config), step=1, learning_rate=1e-3)
    poisoned = "model.norm.weight"
    with torch.no_grad():
        case.step.parameters[poisoned].mul_(float("nan"))  # the next loss is NaN
    run_now([case.step.parameters[poisoned]])

    def state():
        moments = {f"{k} moment {i}": m for k, both in case.step.moments.items() for i, m in enumerate(both)}
        return {k: sharding.fetch(t.detach()) for k, t in {**case.step.parameters, **moments}.items() if k != poisoned}

    before = state()
    for step in (2, 3):
        case.step(make_batch(case.config, seed=step), step=step, learning_rate=1e-3)
    assert all(torch.equal(before[name], value) for name, value in state().items())
    assert case.step.read_metrics().bad_step == 2


def test_clipping_caps_the_global_norm_and_reports_it_unclipped():
    case = make_case("llama_fsdp", one_layer("llama_fsdp"), **PLAIN_LAYERS)
    batch = make_batch(case.config)
    _, expected = case.reference_gradients(batch)
    norm = torch.cat([g.flatten() for g in expected.values()]).norm().item()
    case.step.max_grad_norm = norm / 7
    case.step(batch, step=1, learning_rate=1e-3)
    assert case.step.read_metrics().grad_norm == pytest.approx(norm, rel=1e-4)
    first = {k: m[0].cpu() for k, m in case.step.moments.items()}
    # a first moment is (1 - beta1) * gradient
    clipped = torch.cat([m.flatten() for m in first.values()]).norm().item() / 0.1
    assert clipped == pytest.approx(norm / 7, rel=1e-3)


@pytest.mark.parametrize("recipe", ["mixtral_ep", "mixtral_ep_tp"])  # the second cuts the vocabulary too
def test_an_evaluation_has_the_cross_entropy_without_the_auxiliary_loss_and_the_accuracy_and_ignores_padding(recipe):
    case = make_case(recipe, one_layer(recipe, intermediate_size=80), **PLAIN_LAYERS)
    batch, padded = make_batch(case.config), make_batch(case.config, seed=1)
    padded["labels"][5:] = -100
    # so many right ones that a shift or a mask that is wrong shows; what comes after a position can't change it
    right = case.reference(input_ids=batch["input_ids"]).logits[:, :-1].argmax(-1)
    batch["labels"][:, 1::2] = right[:, ::2]
    total = tokens = correct = 0.0
    for part in (batch, padded):
        output = case.reference(**part, output_router_logits=False)
        scored = part["labels"][:, 1:] != -100
        total += output.loss.item() * scored.sum().item()
        tokens += scored.sum().item()
        correct += ((output.logits[:, :-1].argmax(-1) == part["labels"][:, 1:]) & scored).sum().item()
    found = case.evaluation([batch, padded])
    assert found.loss == pytest.approx(total / tokens, rel=1e-5)
    assert found.perplexity == pytest.approx(math.exp(found.loss))
    assert found.means["accuracy"] == pytest.approx(correct / tokens, rel=1e-6)
    assert 0.1 < found.means["accuracy"] < 0.9
    assert case.evaluation.guard.compiles == 1


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_transformers_own_attention_compiles_once_too(attention):
    config = one_layer("mixtral_ep", intermediate_size=112)
    case = make_case("mixtral_ep", config, attention=attention, **PLAIN_LAYERS)
    batches = [make_batch(case.config, seed=seed) for seed in range(2)]
    expected = case.reference_gradients(batches[0])[0]
    assert case.evaluation(batches).loss > 0
    for step, batch in enumerate(batches, 1):
        case.step(batch, step=step, learning_rate=0.0)
        if step == 1:
            assert case.step.read_metrics().loss == pytest.approx(expected, rel=1e-5)
    assert (case.step.compiles, case.evaluation.guard.compiles) == (1, 1)


def test_a_batch_without_a_scored_token_is_as_if_it_had_not_been_there():
    """Momentum, weight decay and the router's losses would move weights; a mean over no token would end the run."""

    def after(empty: set[int]):
        case = make_case("mixtral_ep", one_layer("mixtral_ep"), **PLAIN_LAYERS)
        done = 0
        for step in range(1, 4 + len(empty)):
            batch = make_batch(case.config, seed=done + 1)
            if step in empty:
                batch["labels"].fill_(-100)
            done += step not in empty
            case.step(batch, step=step, learning_rate=1e-3)
        return case

    case, expected = after({1, 3}), after(set())
    for name, values in expected.step.state.items():
        if name != "metrics":
            assert torch.equal(sharding.fetch(case.step.state[name].detach()), sharding.fetch(values.detach())), name
    found, wanted = case.step.read_metrics(), expected.step.read_metrics()
    assert found == replace(wanted, unscored_steps=2)
    assert found.steps == 3
    assert found.loss > 1
