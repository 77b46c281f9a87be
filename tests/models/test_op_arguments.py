"""`shardwright.models.ops.arguments_as_text`: values as text and back."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest

from shardwright.models.ops.arguments_as_text import as_text, from_text
from shardwright.models.ops.jax_call import Manual

MANUAL = Manual((("data", 2), ("tensor", 4)), ((("data", "tensor"), None),), (("data",),))
VALUES = [None, True, 1, 1.0, 0.1, math.inf, 'a "quoted" text', (), ((), (1, (2.0, None))), MANUAL, (MANUAL, False)]


@pytest.mark.parametrize("value", VALUES, ids=str)
def test_a_value_comes_back_with_the_same_types_also_after_it_was_forgotten(value):
    text = as_text(value)
    for _ in range(2):
        assert from_text(text) == value
        assert repr(from_text(text)) == repr(value)
        from_text.cache_clear()


def test_the_text_is_the_same_in_every_process():
    assert as_text((0.25, MANUAL)) == (
        '[0.25,{"shardwright.models.ops.jax_call:Manual":{"axes":[["data",2],["tensor",4]],'
        '"inputs":[[["data","tensor"],null]],"outputs":[["data"]],"order":null}}]'
    )


def test_what_is_remembered_has_a_bound():
    assert from_text.cache_info().maxsize is not None


@dataclass
class Mutable:
    size: int = 0


@pytest.mark.parametrize("value", [[1], {"a": 1}, {1}, Mutable(), (1, [2])], ids=str)
def test_a_value_that_could_change_has_no_text(value):
    with pytest.raises(TypeError, match=r"a (list|dict|set|Mutable) has no text"):
        as_text(value)
