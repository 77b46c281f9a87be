"""Records → samples by a caller's data collator, one at a time, without its padding.

Rows of one shape are packed later, so only the tokens and labels of the collator's batch are used.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from shardwright.errors import UserError, a_type

Collator = Callable[[list[Any]], Mapping[str, Any]]
_TAKEN = ("input_ids", "labels", "attention_mask", "position_ids")


def collated(records: Dataset | IterableDataset, collator: Collator) -> Dataset | IterableDataset:
    """``records`` with the columns ``input_ids`` and ``labels`` that ``collator`` makes of each.

    A ``Dataset`` is read at once, and the result cached as its ``map`` does. Raises UserError, here or when a stream is
    read, if the collator raises, or makes anything but one sample of a record.
    """
    made = records.map(
        functools.partial(_sample, collator), with_indices=True, remove_columns=list(records.column_names or ())
    )
    return made.select_columns(["input_ids", "labels"])


def _sample(collator: Collator, record: Any, number: int) -> dict[str, list[int]]:
    try:
        batch = collator([record])
    except Exception as error:  # a caller's function may raise anything
        raise _refused(collator, number, f"{type(error).__name__}: {str(error)[:300]}") from error
    if not isinstance(batch, Mapping):
        raise _refused(collator, number, f"{a_type(batch)}, not a dict of columns")
    found = {name: np.asarray(batch[name]) for name in _TAKEN if batch.get(name) is not None}
    others = [name for name, value in batch.items() if name not in _TAKEN and value is not None]
    wrong = [f"{name} of shape {list(values.shape)}" for name, values in found.items() if values.shape[:1] != (1,)]
    if others or wrong or not {"input_ids", "labels"} <= found.keys():
        raise _refused(collator, number, ", ".join(wrong or others) or f"{', '.join(batch)} alone")
    tokens, labels = found["input_ids"][0], found["labels"][0]
    real = found.get("attention_mask", np.ones((1, len(tokens))))[0].astype(bool)
    places = np.flatnonzero(real)
    inside = len(places) and places[-1] - places[0] + 1 != len(places)
    if not len(tokens) == len(labels) == len(real) or inside:
        raise _refused(collator, number, "columns of several lengths, or padding inside the sample")
    positions = found.get("position_ids", np.cumsum(real)[None] - 1)[0][real]
    if (positions != np.arange(len(places))).any():
        raise _refused(collator, number, "position_ids that do not count the sample's tokens")
    return {"input_ids": tokens[real].tolist(), "labels": labels[real].tolist()}


def _refused(collator: Collator, number: int, found: str) -> UserError:
    return UserError(
        asked=f"data_collator={getattr(collator, '__name__', type(collator).__name__)}, of record {number}",
        found=found,
        why="of a list of one record it must make one sample: input_ids and labels [1, T] (-100: not scored), and "
        "perhaps an attention_mask that is 0 on padding; rows are packed from samples beforehand, of one shape",
        instead="a collator of causal language models, on records that it takes: "
        "DataCollatorForLanguageModeling(tokenizer, mlm=False), DataCollatorForSeq2Seq(tokenizer)",
    )
