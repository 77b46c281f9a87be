"""The draws of a generator: no model, only what decides which tokens are sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from shardwright.evaluation import lm
from shardwright.evaluation.generate import GenerationShape, Generator


class Drawn:
    """A decoder whose tokens are the draws themselves."""

    def __init__(self) -> None:
        self.guards = (SimpleNamespace(run=lambda batch, build: build(batch)),) * 2

    def begin(self, prompts: Any, uniform: Any) -> dict[str, Any]:
        return self.next(uniform)

    def next(self, uniform: Any) -> dict[str, Any]:
        return {"next token": (uniform * 2**24).int()}

    def end(self) -> None:
        pass


def test_the_same_prompt_many_times_has_other_answers_beyond_the_rows_at_a_time_too() -> None:
    made = Generator(Drawn(), GenerationShape(rows=2, prompt=4, new=3))  # type: ignore[arg-type]
    answers = made.answers([[1, 2]] * 7, [], seed=5)
    assert len({tuple(answer) for answer in answers}) == 7
    assert answers == made.answers([[1, 2]] * 7, [], seed=5)
    assert answers[:2] == made([[1, 2]] * 2, [], seed=5)
    assert not {*map(tuple, answers)} & {*map(tuple, made.answers([[1, 2]] * 7, [], seed=6))}


def test_repeats_of_a_harness_task_have_other_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Self-consistency votes among many answers to one question."""
    monkeypatch.setattr(lm, "build_generator", lambda placed, shape, sampling: Generator(Drawn(), shape))
    monkeypatch.setattr(lm, "stop_tokens", lambda args, config: set())
    made: Any = object.__new__(lm.LM)
    vars(made).update(
        tok_encode=lambda text: [1, 2],
        tokenizer=SimpleNamespace(eos_token_id=-1, decode=lambda tokens, **_: str(tokens)),
        rows=lambda length, shards: 2,
        job=SimpleNamespace(row_shards=1, args=None, config=None),
        placed=None,
        console=Console(quiet=True),
        max_length=64,
        generators={},
        cache_hook=SimpleNamespace(add_partial=lambda *_: None),
    )
    asked = {"until": [], "max_gen_toks": 4, "do_sample": True, "temperature": 0.7}
    found = made.generate_until([SimpleNamespace(args=("a", asked))] * 7)
    assert len(set(found)) == 7
