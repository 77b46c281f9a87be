"""Merges names into patterns as a person would write them: ``[qkv]_proj``, ``*_layernorm``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from shardwright.layout.recipe import matches

Line = TypeVar("Line")
_SHORTEST = 3  # letters that two words must share for the rest of them to become a ``*``


def shared_patterns(lines: Mapping[str, Line]) -> dict[str, Line]:
    """Merges keys of equal lines into one pattern where it matches no other name.

    Args:
        lines: name, with ``*`` for each number → its line.
    """
    names = {name: name.replace("*", "0") for name in lines}  # an example of each, for patterns to match or not
    found = {}
    for name in lines:
        # numbers and words in one place, as in a Sequential with a norm among its numbers
        mixed = any(matches(name, example) for other, example in names.items() if other != name)
        found[name.replace("*", "[0-9]*") if mixed else name] = [name]
    while (shared := _best(lines, names, found)) is not None:
        pattern, parts = shared
        members = [name for part in parts for name in found[part]]
        found = {  # in the place of the first part
            (pattern if key == parts[0] else key): (members if key == parts[0] else value)
            for key, value in found.items()
            if key == parts[0] or key not in parts
        }
    return {pattern: lines[members[0]] for pattern, members in found.items()}


def _best(
    lines: Mapping[str, Line], names: Mapping[str, str], found: Mapping[str, list[str]]
) -> tuple[str, list[str]] | None:
    """The pattern that merges the most keys of ``found``, and these keys; None if no two can be merged."""
    buckets: dict[tuple[int, tuple[str, ...]], list[str]] = {}
    for pattern in found:
        words = pattern.split(".")
        for place in range(len(words)):
            buckets.setdefault((place, (*words[:place], "", *words[place + 1 :])), []).append(pattern)
    best: tuple[str, list[str]] | None = None
    for (place, _), patterns in buckets.items():
        for one, other in combinations(patterns, 2):
            if lines[found[one][0]] != lines[found[other][0]]:
                continue
            words = one.split(".")
            alike = [p.split(".")[place] for p in patterns if lines[found[p][0]] == lines[found[one][0]]]
            for glob in _globs(words[place], other.split(".")[place], alike):
                pattern = ".".join([*words[:place], glob, *words[place + 1 :]])
                matched = {name for name, example in names.items() if matches(pattern, example)}
                parts = [part for part in found if matched.issuperset(found[part])]
                whole = sum(len(found[part]) for part in parts) == len(matched)
                equal = all(lines[name] == lines[found[one][0]] for name in matched)
                if whole and equal and len(parts) > (len(best[1]) if best else 1):
                    best = pattern, parts
    return best


def _globs(one: str, other: str, alike: Iterable[str]) -> Iterator[str]:
    """Globs that match both words, the closest first; none where they share too little.

    Args:
        alike: all words in this place on equal lines.
    """
    if {one, other} == {"weight", "bias"}:
        yield "*"
    if "*" in (one, other):  # a number's place
        return
    start, end = _start(one, other), _start(one[::-1], other[::-1])[::-1]
    if len(one) == len(other) == len(start) + len(end) + 1:
        letters = [w[len(start)] for w in alike if len(w) == len(one) and w.startswith(start) and w.endswith(end)]
        if all(letter.isalnum() for letter in letters):
            yield f"{start}[{''.join(letters)}]{end}"
    # whole words: input_layernorm and post_attention_layernorm share _layernorm
    end = end[end.index("_") :] if "_" in end else end
    start = start[: start.rindex("_") + 1] if "_" in start else start
    for shared, glob in ((end, f"*{end}"), (start, f"{start}*")):
        if len(shared) >= _SHORTEST and "]" not in shared and "[" not in shared:
            yield glob


def _start(one: str, other: str) -> str:
    """The common beginning of two words."""
    differ = (place for place, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1])
    return one[: next(differ, min(len(one), len(other)))]
