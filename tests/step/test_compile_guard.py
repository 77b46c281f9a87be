"""A step that compiles again is an error that names what changed: an input, or an operation, its module and line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shardwright.errors import BUG, UserError, exit_code_of
from shardwright.step import compile_guard
from shardwright.step.graph_difference import first_difference
from shardwright.xla import sharding
from tests.support.cases import Case, make_batch, make_case


def hooked(name: str, hook: Callable[[Any, Any, torch.Tensor], torch.Tensor], **compute: Any) -> Case:
    """A case whose module ``name`` gives what ``hook`` makes of its output."""
    case = make_case("llama_fsdp", **compute)
    case.step.loss.model.get_submodule(name).register_forward_hook(hook, prepend=True)
    return case


def step(case: Case, number: int, rows: slice = slice(None)) -> None:
    batch = {name: tensor[rows] for name, tensor in make_batch(case.config, seed=number).items()}
    case.step(batch, step=number, learning_rate=1e-3)


def refusal(case: Case, number: int, rows: slice = slice(None)) -> str:
    with pytest.raises(UserError) as refused:
        step(case, number, rows)
    return str(refused.value)


def place_of(hook: Callable[..., Any], text: str) -> str:
    """The file and number of the hook's line with ``text``."""
    lines, first = inspect.getsourcelines(hook)
    (number,) = (first + i for i, line in enumerate(lines) if text in line)
    return f"{__file__}:{number}"


def test_what_building_the_first_graph_raises_comes_again_and_what_a_device_raises_may_pass(monkeypatch):
    wrong = [True]

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output @ output if wrong else output

    def code() -> int:
        with pytest.raises(RuntimeError) as raised:
            step(case, 1)
        return exit_code_of(raised.value)

    case = hooked("model.norm", hook)
    assert code() == BUG
    del wrong[:]
    monkeypatch.setattr(sharding, "shards_on_host", lambda *of: [])  # which the runtime refuses
    assert code() == 1


def test_an_operation_that_joins_and_a_batch_of_another_shape_are_named_and_nothing_more_is_learned(monkeypatch):
    tanh = []

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return torch.tanh(output) if tanh else output

    case = hooked("model.norm", hook)
    step(case, 1)
    found = refusal(case, 2, slice(0, 8))
    assert "the train step on a batch whose 'input_ids' is: shape [8, 16]" in found
    assert "the step was compiled for 'input_ids' being: shape [16, 16]" in found
    step(case, 2)
    assert case.step.compiles == 1
    tanh.append(True)
    learned = {}

    def difference(*given: Any) -> str:
        learned.update(case.parameters())
        return first_difference(*given)

    monkeypatch.setattr(compile_guard, "first_difference", difference)
    found = refusal(case, 3)
    assert case.step.compiles == 2
    place = place_of(hook, "torch.tanh")
    assert f"the first new operation is tanh of f32[16,16,64] in model.norm, from {place}" in found
    assert all(torch.equal(weight, learned[name]) for name, weight in case.parameters().items())


@pytest.mark.slow
def test_a_number_of_one_layer_is_named():
    """A factor of 1 is a constant of the graph, and any other an input of it."""
    factor = 1.0

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        return output * factor

    case = hooked("model.layers.1.mlp", hook, scan=False, remat="none")
    step(case, 1)
    factor = 3.0
    place = place_of(hook, "output * factor")
    assert f"multiply of f32[16,16,64] in model.layers.1.mlp, from {place}" in refusal(case, 2)
