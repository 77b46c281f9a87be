"""What a unigram model of the training tokens scores on the held-out rows."""

from __future__ import annotations

import numpy as np
from datasets import Dataset

from trainer.data.batches import IGNORE, as_batch
from trainer.data.row_stream import RowStream

UNIGRAM_ROWS = 1024  # of a stream


def unigram_loss(train: Dataset | RowStream, heldout: Dataset, vocab_size: int) -> float:
    """Cross entropy, in nats a token, of held-out targets under add-one-smoothed counts of the training tokens.

    Of a stream the first 1024 rows are counted. The targets are those that a model is scored on: all tokens of a row
    but the first, and with isolated documents no document's first. What a model gains over this it owes to context.
    """
    counts, targets = np.zeros(vocab_size), np.zeros(vocab_size)
    counted = [train.first(UNIGRAM_ROWS)] if isinstance(train, RowStream) else train.with_format("numpy").iter(1024)
    for batch in counted:
        counts += np.bincount(batch["input_ids"].ravel(), minlength=vocab_size)
    for batch in heldout.with_format("numpy").iter(1024):
        labels = as_batch(batch)["labels"][:, 1:].numpy()
        targets += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    log_probabilities = np.log(counts + 1) - np.log(counts.sum() + vocab_size)
    return float(-(targets * log_probabilities).sum() / targets.sum())
