"""Judges the tensors of an export by what vLLM's own loaders were recorded to do with such ones."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from safetensors import safe_open

Shapes = dict[str, list[int]]
_AS_IT_LIES = {
    "transposed": lambda shape: [*shape[:-2], shape[-1], shape[-2]],
    "blocks joined": lambda shape: [*shape[:-2], shape[-2] * shape[-1]],
}


def shapes_in(folder: Path) -> Shapes:
    found = {}
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            found |= {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
    return found


def matching(rules: dict[str, Any], name: str) -> list[tuple[str, re.Match[str]]]:
    """The patterns among ``rules`` that ``name`` fits, with its layer and expert."""
    found = []
    for rule in rules:
        words = re.escape(rule).replace(r"\*", r"(?P<layer>\d+)").replace(r"\#", r"(?P<expert>\d+)")
        if match := re.fullmatch(words, name):
            found.append((rule, match))
    return found


def unread(entry: dict[str, Any], shapes: Shapes) -> list[str]:
    """The reasons why vLLM would not read all of an export with tensors of ``shapes``, or not fill all its model."""
    wrong, filled, elements = [], defaultdict(list), defaultdict(int)
    for name, shape in shapes.items():
        if name in entry["skipped"]:
            continue
        rules = matching(entry["read"], name)
        if len(rules) != 1:
            wrong.append(f"{name} fits {len(rules)} rules")
            continue
        rule, found = entry["read"][rules[0][0]], rules[0][1].groupdict()
        part, rows = list(entry["parameters"][rule["in"]]["shape"]), [rule["from"], rule["to"]]
        if "expert" in found:  # of one expert; else of all that the parameter holds
            part[:2] = 1, rows[1] - rows[0]
        else:
            part[0] = rows[1] - rows[0]
        ours = _AS_IT_LIES.get(rule.get("way", ""), list)(shape)
        place = rule["in"].replace("*", found.get("layer", ""))
        if [size for size in part if size > 1] != [size for size in ours if size > 1]:
            wrong.append(f"{name} is {shape}, and its part of {place} is {part}")
        filled[place].append((found.get("expert"), *rows))
        elements[place] += math.prod(shape)
    for pattern, known in entry["parameters"].items():
        for layer in known["layers"] or [""]:
            place = pattern.replace("*", str(layer))
            parts = filled[place]
            if elements.pop(place, 0) != math.prod(known["shape"]) or len(set(parts)) < len(parts):
                wrong.append(f"{place} {known['shape']} is filled by {parts}")
    return wrong + [f"{place} is no parameter there" for place in elements]
