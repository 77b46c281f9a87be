"""The draws of a generator: no model, only what decides which tokens are sampled."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

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
