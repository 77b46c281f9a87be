"""Merges names into patterns as a person would write them: ``[qkv]_proj``, ``*_layernorm``."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import TypeVar

from shardwright.layout.recipe import matches

Line = TypeVar("Line")
_SHORTEST = 3  # letters that two words must share for the rest of them to become a ``*``


def shared_patterns(lines: Mapping[str, Line]) -> dict[str, Line]:
    """Merges names (with ``*`` for each number) of equal ``lines`` into one pattern where it matches no other name."""
    names = {name: name.replace("*", "0") for name in lines}  # an example of each, for patterns to match or not
    found = {}
    for name in lines:
        # numbers and words in one place, as in a Sequential with a norm among its numbers
        mixed = any(matches(name, example) for other, example in names.items() if other != name)
        found[name.replace("*", "[0-9]*") if mixed else name] = [name]
    while (shared := _best(lines, names, found)) is not None:
        pattern, (first, *others) = shared
        members = [name for part in (first, *others) for name in found[part]]
        # in the place of the first
        found = {pattern if part == first else part: found[part] for part in found if part not in others}
        found[pattern] = members
    return {pattern: lines[members[0]] for pattern, members in found.items()}


def _best(
    lines: Mapping[str, Line], names: Mapping[str, str], found: Mapping[str, list[str]]
) -> tuple[str, list[str]] | None:
    """The pattern that merges the most keys of ``found``, and these keys; None if no two can be merged."""
    buckets = defaultdict(list)  # patterns that differ in one word, by its place and the words before and after
    for pattern in found:
        words = pattern.split(".")
        for place in range(len(words)):
            buckets[place, tuple(words[:place]), tuple(words[place + 1 :])].append(pattern)
    best: tuple[str, list[str]] | None = None
    for (place, before, after), patterns in buckets.items():
        for one, other in combinations(patterns, 2):
            line = lines[found[one][0]]
            if line != lines[found[other][0]]:
                continue
            alike = [pattern.split(".")[place] for pattern in patterns if lines[found[pattern][0]] == line]
            for glob in _globs(one.split(".")[place], other.split(".")[place], alike):
                pattern = ".".join([*before, glob, *after])
                matched = {name for name, example in names.items() if matches(pattern, example)}
                parts = [part for part in found if matched.issuperset(found[part])]
                whole = sum(len(found[part]) for part in parts) == len(matched)
                equal = all(lines[name] == line for name in matched)
                if whole and equal and len(parts) > (len(best[1]) if best else 1):
                    best = pattern, parts
    return best


def _globs(one: str, other: str, alike: Iterable[str]) -> Iterator[str]:
    """Globs that match both words, the closest first; ``alike``: all words in their place on equal lines."""
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
