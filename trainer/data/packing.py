"""Documents → tokens → rows of S tokens: pure, and the same rows whatever the groups that documents come in.

Shape legend: B rows, S tokens in a row (``sequence_length``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from trainer.data.documents import has_text

Columns = dict[str, np.ndarray]


class Packer:
    """Documents → rows of S tokens; what does not fill a row waits in ``rest`` for the next call."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, sequence_length: int, isolate_documents: bool) -> None:
        self.tokenizer, self.length, self.isolate = tokenizer, sequence_length, isolate_documents
        self.rest = np.empty(0, dtype=np.int32)

    @property
    def columns(self) -> list[str]:
        """What a row has; all of it int32 [S]."""
        return ["input_ids", *(["segment_ids", "position_ids"] if self.isolate else [])]

    def __call__(self, batch: Mapping[str, list[str | None]]) -> pa.Table:
        """The rows that the documents in ``batch["text"]`` complete; those without text are left out."""
        return as_table(self.rows([text for text in batch["text"] if text and has_text(text)]))

    def rows(self, texts: Sequence[str]) -> Columns:
        """The rows that ``texts`` complete, each of them [B, S]."""
        # verbose: no warning that a document is longer than the model's context; rows never are
        tokens = self.tokenizer(list(texts), add_special_tokens=False, verbose=False)["input_ids"] if texts else []
        end = [self.tokenizer.eos_token_id]
        flat = np.concatenate([self.rest, *(np.array(document + end, dtype=np.int32) for document in tokens)])
        count = len(flat) // self.length
        self.rest = flat[count * self.length :].copy()  # not a view, which would keep all of `flat`
        rows_BS = flat[: count * self.length].reshape(count, self.length)
        return {"input_ids": rows_BS} | (self._documents_of(rows_BS) if self.isolate else {})

    def _documents_of(self, rows_BS: np.ndarray) -> Columns:
        """A document ends with its end-of-text token; one that a row's end cuts goes on as the next row's first."""
        starts_BS = np.ones_like(rows_BS, dtype=bool)
        starts_BS[:, 1:] = rows_BS[:, :-1] == self.tokenizer.eos_token_id
        place_S = np.arange(self.length, dtype=np.int32)
        begun_BS = np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        return {"segment_ids": starts_BS.cumsum(axis=1, dtype=np.int32), "position_ids": place_S - begun_BS}


def as_table(columns: Columns) -> pa.Table:
    """Rows as Arrow: a list of S integers each."""
    return pa.table(
        {name: pa.FixedSizeListArray.from_arrays(x_BS.ravel(), x_BS.shape[1]) for name, x_BS in columns.items()}
    )
