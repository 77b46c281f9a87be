"""Batches of stored rows: every row once an epoch, shared between processes; and what a model is scored on."""

from __future__ import annotations

import pytest
import torch
from datasets import Dataset

from shardwright.data.rows.batches import TrainingBatches, heldout_batches
from shardwright.data.rows.rows import StoredRows, few_rows
from shardwright.errors import UserError


@pytest.fixture
def rows() -> StoredRows:
    """23 rows of 4 tokens, no two tokens equal."""
    return StoredRows(Dataset.from_dict({"input_ids": torch.arange(23 * 4).view(23, 4).tolist()}))


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=0)


# ---- training ----


def drawn(batches: TrainingBatches, count: int) -> torch.Tensor:
    return torch.cat([next(batches)["input_ids"] for _ in range(count)])


def test_an_epoch_gives_every_row_once_and_what_fills_no_batch_begins_the_next(rows: StoredRows) -> None:
    batches = TrainingBatches(rows, 4, seed=0)
    seen = drawn(batches, 23)  # four epochs
    assert seen.dtype == torch.int64
    assert (seen == seen[:, :1] + torch.arange(4)).all(), "rows stay whole"
    for epoch in range(4):
        of_epoch = seen[epoch * 23 : (epoch + 1) * 23, 0].tolist()
        assert sorted(of_epoch) == list(range(0, 92, 4))
        assert of_epoch != sorted(of_epoch)
    assert batches.epoch == 4


def test_the_epoch_is_the_part_of_the_rows_that_were_taken(rows: StoredRows) -> None:
    batches = TrainingBatches(rows, 4, seed=0)
    assert batches.epoch == 0
    drawn(batches, 8)
    assert batches.epoch == pytest.approx(32 / 23)


def test_order_depends_on_seed_and_epoch_alone(rows: StoredRows) -> None:
    def order(seed: int, batch_size: int) -> list[int]:
        return drawn(TrainingBatches(rows, batch_size, seed=seed), 69 // batch_size)[:, 0].tolist()

    assert order(0, 1) == order(0, 3) == order(0, 23)
    assert len({tuple(order(seed, 1)[epoch * 23 : (epoch + 1) * 23]) for seed in range(3) for epoch in range(3)}) == 9


def test_processes_share_each_global_batch_in_order(rows: StoredRows) -> None:
    one = TrainingBatches(rows, 8, seed=3)
    four = [TrainingBatches(rows, 8, seed=3, process_index=i, process_count=4) for i in range(4)]
    for _ in range(7):
        together = [next(share) for share in four]
        assert {tuple(share["labels"].shape) for share in together} == {(2, 4)}
        assert_equal(next(one), {name: torch.cat([share[name] for share in together]) for name in together[0]})


def test_the_names_of_stored_rows_are_those_that_older_checkpoints_hold(rows: StoredRows) -> None:
    more = torch.arange(200 * 2).view(200, 2)
    isolated = {"input_ids": more.tolist(), "segment_ids": torch.ones_like(more).tolist()}
    assert rows.fingerprint == "23 rows, 6cab93d4559f5ef2"
    assert StoredRows(Dataset.from_dict(isolated)).fingerprint == "200 rows, 0ad5182c8e8e57e0"


def test_rows_that_fill_no_batch_come_several_times_in_each_and_a_cursor_goes_on(rows: StoredRows) -> None:
    batches = TrainingBatches(rows, 24, seed=0)
    first = drawn(batches, 1)
    assert sorted(first[:23, 0].tolist()) == list(range(0, 92, 4))
    one = StoredRows(rows.dataset.select([3]))
    assert drawn(TrainingBatches(one, 8, seed=0), 2).eq(torch.arange(12, 16)).all()
    resumed = TrainingBatches(rows, 24, seed=0)
    resumed.load_state_dict(batches.state_dict())
    assert drawn(resumed, 2).equal(drawn(batches, 2))
    assert few_rows(23, 24) == "23 rows for a batch of 24: each comes 1 to 2 times in it"
    assert few_rows(1, 8) == "1 row for a batch of 8: each comes 8 times in it"


def test_a_batch_that_processes_cannot_share_is_refused(rows: StoredRows) -> None:
    with pytest.raises(UserError, match="3 processes"):
        TrainingBatches(rows, 8, seed=0, process_count=3)


# ---- scored ----


def test_heldout_batches_count_every_row_exactly_once_in_one_shape(rows: StoredRows) -> None:
    batches = list(heldout_batches(rows, 5))
    assert {batch["input_ids"].shape for batch in batches} == {(5, 4)}
    labels = torch.cat([batch["labels"] for batch in batches])
    counted = labels[(labels != -100).all(dim=1)]
    torch.testing.assert_close(counted, torch.arange(23 * 4).view(23, 4))
    assert (labels[23:] == -100).all()
    assert len(labels) == 25


def test_labels_are_the_inputs(rows: StoredRows) -> None:
    batch = next(TrainingBatches(rows, 4, seed=0))
    assert_equal({"x": batch["labels"]}, {"x": batch["input_ids"]})


def test_first_token_of_an_isolated_document_is_no_target() -> None:
    columns = {
        "input_ids": [5, 6, 0, 7, 8, 0, 9],
        "segment_ids": [1, 1, 1, 2, 2, 2, 3],
        "position_ids": [0, 1, 2, 0, 1, 2, 0],
    }
    rows = StoredRows(Dataset.from_dict({name: [values] for name, values in columns.items()}))
    (batch,) = heldout_batches(rows, 1)
    assert batch["labels"].tolist() == [[5, 6, 0, -100, 8, 0, -100]]
    assert {name: batch[name].tolist()[0] for name in columns} == columns
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_an_epoch_that_is_left_early_goes_on_with_the_whole_next_one_also_from_a_cursor(rows: StoredRows) -> None:
    batches, straight = TrainingBatches(rows, 4, seed=0), TrainingBatches(rows, 1, seed=0)
    second = drawn(straight, 46)[23:]
    drawn(batches, 2)
    batches.skip_epoch()
    assert batches.epoch == 1
    gone_on = TrainingBatches(rows, 4, seed=0)
    gone_on.load_state_dict(batches.state_dict())
    for found in (batches, gone_on):
        assert torch.equal(drawn(found, 5), second[:20])


# ---- the rows that are evaluated ----


@pytest.mark.parametrize("most", [1, 2, 7, 22, 23, 24, 0])
def test_the_rows_to_evaluate_are_spread_over_all_in_their_order_and_always_the_same(rows: StoredRows, most) -> None:
    picked = rows.spread(most)
    count = min(most, 23) or 23
    numbers = [row[0] // 4 for row in picked.dataset["input_ids"]]
    assert len(picked) == count
    assert numbers == sorted(set(numbers))
    gaps = {after - before for before, after in zip(numbers, [*numbers[1:], 23], strict=True)}
    assert numbers[0] == 0
    assert gaps <= {23 // count, -(-23 // count)}
    assert rows.spread(most).dataset["input_ids"][:] == picked.dataset["input_ids"][:]


@pytest.mark.parametrize("hosts", [1, 2])
def test_rows_to_evaluate_that_fill_no_batch_are_scored_once_in_a_whole_one(rows: StoredRows, hosts) -> None:
    shares = [list(heldout_batches(rows.spread(3), 8, index, hosts)) for index in range(hosts)]
    assert [len(batches) for batches in shares] == [1] * hosts
    labels = torch.cat([batches[0]["labels"] for batches in shares])
    assert labels.shape == (8, 4)
    assert labels[labels[:, 0] != -100][:, 0].tolist() == [0, 28, 60]
