"""The unigram model's loss, against numbers computed by hand."""

from __future__ import annotations

import math
import time

import pytest
from datasets import Dataset

from shardwright.data.rows.mixture import MixedRows
from shardwright.data.rows.rows import StoredRows
from shardwright.data.unigram import unigram_loss


def rows(**columns: list[list[int]]) -> StoredRows:
    return StoredRows(Dataset.from_dict(columns))


def test_unigram_loss_is_the_one_computed_by_hand() -> None:
    train = rows(input_ids=[[0, 1, 1], [1, 2, 0]])  # counts 2, 3, 1, 0: smoothed 3, 4, 2, 1 of 10
    heldout = rows(input_ids=[[2, 0, 1], [0, 3, 3]])  # targets 0, 1, 3, 3
    expected = -(math.log(0.3) + math.log(0.4) + 2 * math.log(0.1)) / 4
    assert unigram_loss(train, heldout, 4) == pytest.approx(expected, rel=1e-12)


def test_unigram_loss_counts_all_stored_rows_however_many() -> None:
    train = rows(input_ids=[[0, 0]] * 1024 + [[1, 1]] * 1024)  # as often 0 as 1: smoothed 2049, 2049, 1 of 4099
    assert unigram_loss(train, rows(input_ids=[[0, 1]]), 3) == pytest.approx(-math.log(2049 / 4099), rel=1e-12)


def test_unigram_loss_leaves_out_what_the_model_is_not_scored_on() -> None:
    train = rows(input_ids=[[0, 1]])  # smoothed 2, 2, 1 of 5
    heldout = rows(input_ids=[[1, 0, 2, 1]], segment_ids=[[1, 1, 2, 2]])  # targets 0, 1
    assert unigram_loss(train, heldout, 3) == pytest.approx(-math.log(0.4), rel=1e-12)


def test_a_small_dataset_of_a_mixture_is_counted_once_however_often_its_rows_come() -> None:
    few, many = rows(input_ids=[[0, 0]]), rows(input_ids=[[1, 1]] * 20_000)
    started = time.process_time()
    loss = unigram_loss(MixedRows([few, many], [500, 500]), rows(input_ids=[[0, 1]]), 150_000)  # as often 0 as 1
    assert loss == pytest.approx(-math.log(40_001 / 230_000), rel=1e-12)
    assert time.process_time() - started < 5
