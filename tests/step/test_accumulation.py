"""Gradients cross devices once a step, whatever the number of micro-batches, and are those of one big batch."""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.models.ops import partial_gradients
from shardwright.models.ops.partial_gradients import SUFFIX
from tests.support.cases import PLAIN_LAYERS
from tests.support.fork_server import run
from tests.support.quick_compile import QUICK_COMPILE

# (recipe, micro-batches, overrides of Compute); each is one compile in the one child process that runs them all
CASES: dict[str, tuple[str, int, dict[str, object]]] = {
    "llama_fsdp": ("llama_fsdp", 4, {}),
    "llama_fsdp without scan, 2 micro-batches": ("llama_fsdp", 2, {"scan": False}),
    "llama_tp without remat": ("llama_tp", 4, PLAIN_LAYERS),
    "mixtral_ep, capacity": ("mixtral_ep", 4, {"experts": "capacity"}),
    "mixtral_ep_tp, capacity": ("mixtral_ep_tp", 4, {"experts": "capacity"}),
    "mixtral_ep, whose dropless experts are reduced every micro-batch": ("mixtral_ep", 4, {}),
    "reduced every micro-batch": ("llama_fsdp", 4, {"reduce_gradients": "micro_batch", **PLAIN_LAYERS}),
}
LENGTH = 13  # no dimension of a parameter is a multiple of it, and every activation has one that is


def gradient_reductions(hlo: str) -> dict[str, int]:
    """Weight gradients summed over devices, by whether the sum stands in a loop; ``hlo`` is optimised HLO text."""
    counts, inside = {"once a step": 0, "in a loop": 0}, False
    for line in hlo.splitlines():
        if line.endswith("{") and not line.startswith(" "):
            inside = not line.startswith("ENTRY")  # the only loops are those over micro-batches and layers
        found = re.search(r"= (.*?) (?:all-reduce|reduce-scatter)(?:-start)?\(", line)
        for dims in re.findall(r"\w+\[([\d,]+)\]", found[1]) if found else ():
            if not any(int(dim) % LENGTH == 0 for dim in dims.split(",")):
                counts["in a loop" if inside else "once a step"] += 1
    return counts


def measure(folder: Path) -> dict[str, dict[str, object]]:
    """Gradients and compiled program of every case; the process must dump its HLO to ``folder``."""
    from shardwright.xla.runtime import init_runtime
    from tests.support.cases import make_case, one_layer, relative

    init_runtime()
    results: dict[str, dict[str, object]] = {}
    for name, (recipe, count, compute) in CASES.items():
        config = None if compute.get("scan", True) else one_layer(recipe)
        case = make_case(recipe, config, accumulation=count, router_loss=False, **compute)
        tokens = torch.randint(0, 256, (32, LENGTH), generator=torch.Generator().manual_seed(0))
        labels = tokens.masked_fill(torch.arange(LENGTH) < torch.arange(32).unsqueeze(1) // 3, -100)
        batch = {"input_ids": tokens, "labels": labels}
        _, gradients = case.gradients(batch)
        hlo = max(folder.glob("*after_optimizations.txt"), key=lambda file: file.stat().st_size).read_text()
        worst, where = relative(gradients, case.reference_gradients(batch)[1])
        sums = {p.parameter: len(p.sum.scatter) + bool(p.sum.add) for p in case.step.loss.partials.values()}
        expected = sum(sums.get(parameter, 1) for parameter in case.step.parameters)
        expected += 2 * bool(case.step.routing.experts)  # each expert's load, and what was dropped
        results[name] = {**gradient_reductions(hlo), "sums": expected, "worst": [worst, where]}
        for file in folder.iterdir():
            file.unlink()
    return results


@pytest.fixture(scope="module")
def measured():
    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text {QUICK_COMPILE}"
        child = run("-m", "tests.step.test_accumulation", folder, env={**os.environ, "XLA_FLAGS": flags})
    assert child.returncode == 0, child.stderr[-3000:]
    return json.loads(child.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", [name for name in CASES if "every" not in name])
def test_each_gradient_crosses_devices_once_a_step_and_never_in_the_loop_over_micro_batches(measured, name):
    found = measured[name]
    assert found["in a loop"] == 0
    assert found["once a step"] == found["sums"]


def test_a_recipe_may_reduce_every_micro_batch_and_hold_no_undivided_gradient(measured):
    found = measured["reduced every micro-batch"]
    assert found["in a loop"] >= found["sums"] / 2
    assert found["once a step"] == 0


@pytest.mark.parametrize("name", CASES)
def test_gradients_equal_those_of_one_big_batch_on_the_plain_model(measured, name):
    worst, where = measured[name]["worst"]
    assert worst < 1e-5, f"{where} is off by {worst}"


class Known(nn.Module):
    """Every operation whose weight gradient is kept apart, one of them tied."""

    def __init__(self, padding_idx: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6, padding_idx=padding_idx)
        self.linear = nn.Linear(6, 6)
        self.norm = nn.Parameter(torch.randn(6))
        self.shift = nn.Parameter(torch.randn(6))
        self.up, self.up_bias = nn.Parameter(torch.randn(3, 5, 6)), nn.Parameter(torch.randn(3, 5))
        self.down = nn.Parameter(torch.randn(3, 5, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.norm * self.linear(self.embed(ids)).tanh() + self.shift
        x = (x * self.norm).flatten(0, 1).expand(3, -1, -1)
        up = partial_gradients.expert_bias(partial_gradients.expert_linear(x, self.up, False), self.up_bias)
        y = partial_gradients.expert_linear(up.tanh(), self.down, True).sum(0)
        return F.linear(y, self.embed.weight)


class Unknown(nn.Module):
    """A weight that also enters by operations not known; rows that no shards divide; an embedding of 1-D positions."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.randn(6))
        self.column = nn.Parameter(torch.randn(1))
        self.positions = nn.Parameter(torch.randn(4, 6))
        self.matrix = nn.Parameter(torch.randn(6, 6))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.one_hot(ids, 6).to(torch.float32) + F.embedding(torch.arange(3), self.positions)
        return (self.norm.exp() * x * self.norm) @ self.matrix * self.column


def both(module, ids, shards):
    """Gradients of a nonlinear loss: plain; of the parameters and of the partials when there are partials."""

    def loss(tensors):
        y = partial_gradients.functional_call(module, tensors, (ids,))
        return (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sin().sum()

    parameters = {k: p.detach().requires_grad_() for k, p in module.named_parameters()}
    plain = dict(zip(parameters, torch.autograd.grad(loss(parameters), parameters.values()), strict=True))
    partials = {k + SUFFIX: torch.full((shards, *p.shape), torch.nan).requires_grad_() for k, p in parameters.items()}
    leaves = {**parameters, **partials}
    found = dict(zip(leaves, torch.autograd.grad(loss(leaves), leaves.values(), allow_unused=True), strict=True))
    return plain, {k: found[k] for k in parameters}, {k: found[k + SUFFIX] for k in parameters}


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_the_gradient_of_every_known_operation_is_wholly_partial_and_sums_to_the_plain_one(padding_idx):
    torch.manual_seed(0)
    plain, whole, partial = both(Known(padding_idx), torch.randint(0, 10, (4, 3)), shards=2)
    assert {k for k, g in whole.items() if g is not None} == set()
    sums = {k: g.sum(0) for k, g in partial.items()}
    torch.testing.assert_close(sums, plain, rtol=1e-4, atol=1e-5)


def test_a_partial_gradient_holds_the_rows_of_its_own_batch_shard():
    torch.manual_seed(0)
    module, x = nn.Linear(6, 5), torch.randn(4, 3, 6)
    leaves = {**dict(module.named_parameters()), "weight" + SUFFIX: torch.zeros(2, 5, 6, requires_grad=True)}
    partial_gradients.functional_call(module, leaves, (x,)).sin().sum().backward()
    for shard, rows in enumerate(x.chunk(2)):
        (expected,) = torch.autograd.grad(module(rows).sin().sum(), [module.weight])
        torch.testing.assert_close(leaves["weight" + SUFFIX].grad[shard], expected)


def test_what_no_rule_knows_keeps_its_own_gradient_and_the_sum_of_both_is_right():
    torch.manual_seed(0)
    plain, whole, partial = both(Unknown(), torch.randint(0, 6, (4, 3)), shards=2)
    assert {k for k, g in whole.items() if g is not None} == {"norm", "column", "positions", "matrix"}
    assert {k for k, g in partial.items() if g is not None} == {"norm"}
    for name, gradient in plain.items():
        total = whole[name] if partial[name] is None else whole[name] + partial[name].sum(0)
        torch.testing.assert_close(total, gradient, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
