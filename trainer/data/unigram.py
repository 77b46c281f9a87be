"""The loss of a unigram model of the training tokens on the held-out rows."""

import numpy as np

from shardwright.data.rows.batches import as_batch
from shardwright.data.rows.rows import Rows, StoredRows
from shardwright.models.ops.labels import IGNORE


def unigram_loss(train: Rows, heldout: StoredRows, vocab_size: int) -> float:
    """Cross entropy, in nats a token, of the held-out targets under add-one-smoothed counts of the training tokens.

    Counted are the first 1024 rows of a stream, and the scored tokens of samples. The targets are a model's: all tokens
    of a row but the first, and with isolated documents no document's first. A model's gain over this is due to context.
    """
    counts, targets = train.token_counts(vocab_size), np.zeros(vocab_size)
    for columns in heldout.groups():
        labels = as_batch(columns)["labels"][:, 1:].numpy()
        targets += np.bincount(labels[labels != IGNORE], minlength=vocab_size)
    log_probabilities = np.log(counts + 1) - np.log(counts.sum() + vocab_size)
    return float(-(targets * log_probabilities).sum() / targets.sum())
