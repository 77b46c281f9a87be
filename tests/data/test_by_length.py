"""Rows of one sample each, in batches as short as their samples: each row once, in short runs of one length."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.data.corpus import DataOptions, load_corpus
from shardwright.data.rows.batches import TrainingBatches
from shardwright.data.rows.by_length import in_runs, used
from shardwright.data.rows.mixture import MixedRows
from shardwright.data.rows.rows import Rows
from shardwright.data.samples.fitting import SampleOptions
from shardwright.errors import UserError
from shardwright.evaluation.column_rows import ColumnRows
from shardwright.models.ops.labels import IGNORE
from tests.data.test_fitting import TOKENIZER
from tests.support.chats import write_records

LENGTH, LENGTHS = 64, (16, 32, 64)


def rows_of(folder: Path, count: int, **options: Any) -> Rows:
    """Rows of samples of 3 to 64 tokens, most of them short; the first two tokens of each are its number."""
    sizes = np.exp(np.random.default_rng(0).uniform(np.log(3), np.log(LENGTH), count)).astype(int)
    tokens = [[i // 100, i % 100, *range(2, int(n))] for i, n in enumerate(sizes)]
    records = [{"input_ids": each, "labels": [IGNORE, *each[1:]]} for each in tokens]
    folder.mkdir(parents=True, exist_ok=True)
    path = write_records(folder / "samples.jsonl", records)
    settings = {"sequence_length": LENGTH, "isolate_documents": True, "heldout_fraction": 0.1, **options}
    samples = SampleOptions(packing=False)
    return load_corpus(DataOptions(str(path), samples=samples, **settings), TOKENIZER, 300, folder / "cache").train


def names(batch: Any) -> list[int]:
    return (batch["input_ids"][:, 0] * 100 + batch["input_ids"][:, 1]).tolist()


@pytest.mark.parametrize("options", [{}, {"streaming": True, "shuffle_rows": 50}], ids=["stored", "streamed"])
def test_each_row_comes_once_an_epoch_in_batches_of_a_few_lengths(tmp_path: Path, options: Any) -> None:
    rows = rows_of(tmp_path, 400, **options)
    batches = TrainingBatches(rows, 8, seed=0, lengths=LENGTHS)
    order = rows.order(0, 8, {"epoch": 0, "row": 0})
    epoch = 0
    while int(order.epoch) == 0:
        epoch += len(order.take(1))
    epoch -= bool(options)  # of a stream, the first row of the next epoch says that this one is over
    found = [next(batches) for _ in range(2 * epoch // 8)]
    counts = Counter(name for batch in found for name in names(batch))
    assert len(counts) == epoch
    assert set(counts.values()) <= {1, 2}
    for batch in found:
        longest = int((batch["segment_ids"] > 0).sum(1).max())
        assert batch["input_ids"].shape == (8, min(n for n in LENGTHS if n >= longest))
    lengths = [batch["input_ids"].shape[1] for batch in found]
    assert np.mean(lengths) < 40, "in random order nearly every batch would hold a long row"
    assert len(list(itertools.groupby(lengths))) > len(lengths) / 4, "short and long come in turn"


def test_an_order_goes_on_before_the_column_beside_the_rows_is_known(tmp_path: Path) -> None:
    """As that of DPO, whose reference is read once a resumed run has its place in the data."""
    stored: Any = rows_of(tmp_path, 100)

    def batches() -> tuple[TrainingBatches, ColumnRows]:
        rows = ColumnRows(stored, "reference")
        return TrainingBatches(rows, 4, seed=0, lengths=LENGTHS), rows

    whole, rows = batches()
    rows.values = np.arange(len(rows), dtype=np.float32)[:, None]
    expected = list(itertools.islice(whole, 3))[2]
    again, rows = batches()
    again.load_state_dict(json.loads(json.dumps(cursor_after(batches, 2))))
    rows.values = np.arange(len(rows), dtype=np.float32)[:, None]
    for name, values in next(again).items():
        assert (values == expected[name]).all(), name


def cursor_after(batches: Any, count: int) -> dict[str, Any]:
    """The place in the data after so many batches."""
    made, rows = batches()
    rows.values = np.zeros((len(rows), 1), np.float32)
    for _ in range(count):
        next(made)
    return made.state_dict()


def test_no_token_that_counts_is_cut_off(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 100)
    whole, cut = TrainingBatches(rows, 1, seed=0), TrainingBatches(rows, 1, seed=0, lengths=LENGTHS)
    expected = {names(batch)[0]: batch for batch in itertools.islice(whole, 90)}
    for batch in itertools.islice(cut, 80):
        other, size = expected[names(batch)[0]], batch["input_ids"].shape[1]
        for name, values in batch.items():
            assert (values == other[name][:, :size]).all()
        assert (other["labels"][:, size:] == IGNORE).all()
        assert (other["segment_ids"][:, size:] == 0).all()


@pytest.mark.parametrize("options", [{}, {"streaming": True, "shuffle_rows": 50}], ids=["stored", "streamed"])
@pytest.mark.parametrize("stop", [1, 7, 40, 44, 45, 60, 91])
def test_it_goes_on_where_it_was_stopped_whatever_the_batch_size(tmp_path: Path, options: Any, stop: int) -> None:
    rows = rows_of(tmp_path, 400, **options)
    batches = TrainingBatches(rows, 8, seed=0, lengths=LENGTHS)
    for _ in range(stop):
        next(batches)
    cursor = json.loads(json.dumps(batches.state_dict()))
    expected = [next(batches) for _ in range(60)]
    same, other = (TrainingBatches(rows, size, seed=0, lengths=LENGTHS) for size in (8, 4))
    for again in (same, other):
        again.load_state_dict(cursor)
    for batch in expected:
        twin = next(same)
        assert twin.keys() == batch.keys()
        assert all((twin[name] == values).all() for name, values in batch.items())
        assert names(batch) == names(next(other)) + names(next(other))
    assert same.epoch == batches.epoch


def test_processes_cut_their_shares_of_a_batch_alike(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 400)
    one = TrainingBatches(rows, 8, seed=0, lengths=LENGTHS)
    shares = [TrainingBatches(rows, 8, 0, i, 4, LENGTHS) for i in range(4)]
    for _ in range(60):
        batch, parts = next(one), [next(share) for share in shares]
        assert names(batch) == [name for part in parts for name in names(part)]
        assert {part["input_ids"].shape[1] for part in parts} == {batch["input_ids"].shape[1]}


def test_a_mixture_comes_so_too(tmp_path: Path) -> None:
    mixed = MixedRows([rows_of(tmp_path / "a", 200), rows_of(tmp_path / "b", 100)], [700, 300])
    batches = TrainingBatches(mixed, 8, seed=0, lengths=LENGTHS)
    found = [next(batches) for _ in range(30)]
    cursor, again = batches.state_dict(), TrainingBatches(mixed, 8, seed=0, lengths=LENGTHS)
    again.load_state_dict(json.loads(json.dumps(cursor)))
    assert names(next(batches)) == names(next(again))
    assert np.mean([batch["input_ids"].shape[1] for batch in found]) < 40


def test_a_cursor_of_rows_in_another_order_is_refused(tmp_path: Path) -> None:
    rows = rows_of(tmp_path, 100)
    cursor = TrainingBatches(rows, 8, seed=0).state_dict()
    with pytest.raises(UserError, match="--packing"):
        TrainingBatches(rows, 8, seed=0, lengths=LENGTHS).load_state_dict(cursor)
    batches = TrainingBatches(rows, 8, seed=0, lengths=LENGTHS)
    for runs in ({"size": 0, "taken": 0, "begun": 0}, {"size": 8, "taken": 9999, "begun": 0}, {"size": 8}, 7):
        with pytest.raises(UserError, match="not what state_dict"):
            batches.load_state_dict({**batches.state_dict(), "runs": runs})


@given(kinds=st.lists(st.integers(0, 3), min_size=1, max_size=60), size=st.integers(1, 7), head=st.integers(0, 6))
def test_runs_hold_each_row_once_and_are_of_one_kind_but_for_what_is_left_over(
    kinds: list[int], size: int, head: int
) -> None:
    head = min(head, size - 1)
    order = in_runs(np.array(kinds), size, head, np.random.default_rng(0))
    assert sorted(order.tolist()) == list(range(len(kinds)))
    runs = [order[n : n + size] for n in range(head, len(order), size)]
    mixed = sum(len({kinds[i] for i in run}) > 1 for run in runs)
    assert mixed <= 1 + 4  # what is left of each kind, and of a run that was taken for the head


def test_what_counts_ends_with_the_padding_or_with_the_last_scored_token() -> None:
    segments, labels = np.array([[1, 1, 2, 0], [1, 0, 0, 0], [0, 0, 0, 0]]), np.array([[-100, 5, -100, -100]] * 3)
    assert used({"segment_ids": segments, "labels": labels}).tolist() == [3, 1, 1]
    assert used({"labels": labels}).tolist() == [2, 2, 2]
