"""Documents → tokens → rows of S tokens, the same however the documents are grouped into calls.

Shape legend: B rows, S tokens in a row (``sequence_length``).
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from shardwright.data.records.document_stream import has_text
from shardwright.data.tokenizer import plain_tokens

Columns = dict[str, np.ndarray]
ISOLATED = ("segment_ids", "position_ids")  # columns of rows that say which document each token belongs to

# most documents, and most characters of a stream's documents, tokenised in one call
DOCUMENTS_AT_ONCE, CHARACTERS_AT_ONCE = 256, 4 << 20


class AnyPacker(ABC):
    """Documents → rows of S tokens. ``isolate``: they say which document each token belongs to.

    ``parse``: names of special tokens in texts are these tokens.
    """

    groups = 1  # groups of documents packed in one call
    widths: Mapping[str, int] = MappingProxyType({})  # columns of float32 → numbers a token

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        sequence_length: int,
        isolate: bool,
        labels: bool = False,
        parse: bool = False,
    ) -> None:
        self.tokenizer, self.length, self.isolate, self.labels = tokenizer, sequence_length, isolate, labels
        self.parse = parse
        self.rest = np.empty(0, dtype=np.int32)  # tokens that wait for the next call
        self.tally: Counter[str] = Counter()  # counts so far; `shardwright.data.samples.tally.notes` has the words

    @property
    def columns(self) -> list[str]:
        """The names of a row's columns, each int32 [S]; of :attr:`widths` float32 [S, width]."""
        labels = ["labels"] if self.labels else []
        return ["input_ids", *labels, *(ISOLATED if self.isolate else ()), *self.widths]

    def __call__(self, batch: Mapping[str, list[str | None]]) -> pa.Table:
        return as_table(self.rows([text for text in batch["text"] if text]))

    @abstractmethod
    def rows(self, documents: Sequence[str]) -> Columns:
        """The rows that ``documents`` complete, each column [B, S]."""


class Packer(AnyPacker):
    """Documents of text → rows of S tokens: joined, and cut every S tokens; ``labels``: they have them, as samples do.

    Tokens that do not fill a row wait in ``rest`` for the next call.
    """

    def rows(self, documents: Sequence[str]) -> Columns:
        tokens = plain_tokens(self.tokenizer, [*filter(has_text, documents)], self.tally, self.parse)
        end = [self.tokenizer.eos_token_id]
        flat = np.concatenate([self.rest, *(np.array(document + end, dtype=np.int32) for document in tokens)])
        count = len(flat) // self.length
        self.rest = flat[count * self.length :].copy()  # not a view, which would keep all of `flat`
        rows_BS = flat[: count * self.length].reshape(count, self.length)
        made = {"input_ids": rows_BS} | ({"labels": rows_BS} if self.labels else {})
        return made | (self._documents_of(rows_BS) if self.isolate else {})

    def _documents_of(self, rows_BS: np.ndarray) -> Columns:
        """``segment_ids`` and ``position_ids``. A document cut by a row's end continues as the next row's first."""
        starts_BS = np.ones_like(rows_BS, dtype=bool)
        starts_BS[:, 1:] = rows_BS[:, :-1] == self.tokenizer.eos_token_id
        place_S = np.arange(self.length, dtype=np.int32)
        begun_BS = np.maximum.accumulate(np.where(starts_BS, place_S, 0), axis=1)
        return {"segment_ids": starts_BS.cumsum(axis=1, dtype=np.int32), "position_ids": place_S - begun_BS}


def as_table(columns: Columns) -> pa.Table:
    """Rows as an Arrow table: each column has a list of S numbers a row, or S * width of them."""
    return pa.table(
        {name: pa.FixedSizeListArray.from_arrays(x.ravel(), int(np.prod(x.shape[1:]))) for name, x in columns.items()}
    )
