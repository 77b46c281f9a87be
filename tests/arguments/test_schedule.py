"""Learning rates are those of transformers' schedulers, at every step; what gives none is refused by name."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from transformers import get_scheduler
from transformers.trainer_utils import SchedulerType

from shardwright.arguments.schedule import KINDS, Schedule
from shardwright.arguments.training import TrainingArguments
from shardwright.errors import UserError

PEAK, WARMUP, STEPS = 1e-3, 5, 40
# kind → arguments to try besides none; where one is needed, the first have it
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "linear": [{}],
    "cosine": [{}, {"num_cycles": 1.5}],
    "cosine_with_restarts": [{}, {"num_cycles": 3}],
    "polynomial": [{}, {"power": 2.0, "lr_end": 1e-5}],
    "constant": [{}],
    "constant_with_warmup": [{}],
    "inverse_sqrt": [{}, {"timescale": 100}],
    "cosine_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-4, "num_cycles": 1.0}],
    "cosine_warmup_with_min_lr": [{"min_lr_rate": 0.1}, {"min_lr": 1e-4, "warmup_lr_rate": 0.2}],
    "warmup_stable_decay": [{"num_decay_steps": 10}, {"num_decay_steps": 9,
        "num_stable_steps": 7, "warmup_type": "cosine"}],
}  # fmt: skip
CASES = [(kind, options) for kind, several in OPTIONS.items() for options in several]


def rates(schedule: Schedule, count: int) -> list[float]:
    found = []
    for _ in range(count):
        found.append(schedule.learning_rate)
        schedule.advance()
    return found


def test_every_scheduler_of_transformers_is_offered_but_those_that_need_a_loss() -> None:
    assert {kind.value for kind in SchedulerType} - set(KINDS) == {"reduce_lr_on_plateau", "greedy"}
    assert OPTIONS.keys() == set(KINDS)


@pytest.mark.parametrize(("kind", "options"), CASES, ids=str)
def test_rates_are_transformers_own_and_a_resumed_schedule_goes_on_with_them(kind: str, options: dict) -> None:
    carrier = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=PEAK)
    with warnings.catch_warnings(action="ignore"):
        theirs = get_scheduler(kind, carrier, WARMUP, STEPS, dict(options))
    expected = []
    for _ in range(STEPS):
        expected.append(theirs.get_last_lr()[0])
        carrier.step()
        theirs.step()
    assert rates(Schedule(kind, PEAK, WARMUP, STEPS, options), STEPS) == expected
    resumed = Schedule(kind, PEAK, WARMUP, STEPS, options)
    resumed.advance(17)
    assert rates(resumed, STEPS - 17) == expected[17:]
    args = TrainingArguments("any", lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=5, max_steps=40)
    assert rates(args.schedule(PEAK), STEPS) == expected


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        ("cosine_with_min_lr", {}, r"One of min_lr or min_lr_rate(.|\n)*num_cycles, min_lr, min_lr_rate"),
        ("cosine_warmup_with_min_lr", {}, "One of min_lr or min_lr_rate"),
        ("cosine_with_min_lr", {"min_lr": 1, "min_lr_rate": 1}, "Only one of"),
        ("warmup_stable_decay", {}, r"no num_decay_steps, which it needs(.|\n)*num_decay_steps \(needed\)"),
        ("warmup_stable_decay", {"num_decay_steps": 5, "decay_type": "square"}, "Unknown decay type: square"),
        ("cosine", {"num_cycle": 2}, "no argument 'num_cycle'; did you mean 'num_cycles'"),
        ("constant", {"num_cycles": 2}, r"no argument 'num_cycles'(.|\n)*no --lr_scheduler_kwargs"),
        ("linear", {"last_epoch": 3}, "no argument 'last_epoch'"),
        ("polynomial", {"lr_end": 1.0}, "must be smaller than initial lr"),
        ("polynomial", {"power": "two"}, "TypeError at step"),
        ("cosine", {"num_cycles": "two"}, "could not convert string to float"),
        ("inverse_sqrt", {"timescale": 0}, "at step"),
        ("warmup_stable_decay", {"num_decay_steps": None}, "TypeError"),
        ("greedy", {}, "'greedy' is none of the known ones"),
        ("reduce_lr_on_plateau", {}, "none of the known ones"),
    ],
)
def test_arguments_that_give_no_rates_are_refused_by_name(kind: str, options: dict, words: str) -> None:
    with pytest.raises(UserError, match=words):
        TrainingArguments("any", lr_scheduler_type=kind, lr_scheduler_kwargs=options)


@pytest.mark.parametrize(("kind", "options"), CASES)
def test_a_notice_says_that_the_warmup_is_longer_than_the_run(kind: str, options: dict) -> None:
    for warmup in (0, 5, 39, 40, 41):
        schedule, rates = Schedule(kind, 1.0, warmup, 40, options), []
        for _ in range(40):
            rates.append(schedule.learning_rate)
            schedule.advance()
        assert bool(schedule.notice) == (warmup >= 40 and max(rates) < 1.0)


def test_a_warmup_of_all_steps_divides_by_no_zero() -> None:
    for kind, options in CASES:
        TrainingArguments("any", lr_scheduler_type=kind, lr_scheduler_kwargs=options, warmup_steps=40, max_steps=40)
