"""Answers one by one, each a good one or a bad one, and beside them prompts with answers to others.

From these mismatched ones KTO (arXiv:2402.01306) estimates how far a model is from its start.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from shardwright.data.samples.samples import Group, Sample
from shardwright.models.ops.labels import IGNORE
from shardwright.objectives.objective import MISMATCHED


def one_by_one(made: Iterable[tuple[int, Group]], places: Sequence[str]) -> list[tuple[int, Group]]:
    """(number, samples) of each answer in ``made``; of a pair the first is a good one, and the second a bad one.

    If :data:`MISMATCHED` is among the ``places`` of a record, each scored answer has its mismatched one beside it.
    """
    answers = [
        (number, replace(sample, place=sample.place or place))
        for number, group in made
        for place, sample in enumerate(group, start=1)
    ]
    if MISMATCHED not in places:
        return [(number, (sample,)) for number, sample in answers]
    others = _mismatched([sample for _, sample in answers if sample.scored], 1 + places.index(MISMATCHED))
    return [(number, (sample, next(others)) if sample.scored else (sample,)) for number, sample in answers]


def _mismatched(samples: Sequence[Sample], place: int) -> Iterator[Sample]:
    """Each sample's prompt with the answer of the one before it, as trl has it; the first gets the last one's.

    If neighbours have the same prompt, it is the answer further before, by the first distance at which the fewest
    prompts meet themselves. A lone sample gets its own answer.
    """
    starts = [int(np.argmax(sample.labels != IGNORE)) for sample in samples]
    known: dict[bytes, int] = {}
    prompts = np.array(
        [known.setdefault(s.tokens[:n].tobytes(), len(known)) for s, n in zip(samples, starts, strict=True)]
    )
    shifts = range(1, len(samples))
    shift = min(shifts, key=lambda n: int((prompts == np.roll(prompts, n)).sum()), default=0)
    for i, (own, start) in enumerate(zip(samples, starts, strict=True)):
        other, first = samples[i - shift], starts[i - shift]
        tokens = np.concatenate([own.tokens[:start], other.tokens[first:]])
        yield Sample(tokens, np.concatenate([own.labels[:start], other.labels[first:]]), place=place)
