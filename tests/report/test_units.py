"""Bytes as text, and back."""

from __future__ import annotations

import pytest

from shardwright.report.units import parse_size, size


@pytest.mark.parametrize(
    ("count", "decimals", "text"),
    [
        (0, 1, "0 B"),
        (1023, 2, "1,023 B"),
        (1024, 1, "1.0 KiB"),
        (1.5 * 2**20, 2, "1.50 MiB"),
        (53.8 * 2**30, 1, "53.8 GiB"),
        (2**30 - 1, 1, "1,024.0 MiB"),
        (5000 * 2**40, 1, "5,000.0 TiB"),
    ],
)
def test_bytes_are_told_in_the_largest_unit_that_they_fill(count: float, decimals: int, text: str) -> None:
    assert size(count, decimals) == text


@pytest.mark.parametrize(
    ("text", "count"),
    [("640", 640), ("512B", 512), ("1.50K", 1536), ("2M", 2**21), ("28.00G", 28 * 2**30), ("1T", 2**40), ("none", 0)],
)
def test_a_size_is_read_as_xla_writes_it(text: str, count: int) -> None:
    assert parse_size(text) == count
