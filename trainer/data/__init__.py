"""Data: from text to the batches of a step.

Documents are tokenised and packed into rows, stored or streamed; rows are shuffled and batched. A cursor says which row
comes next, so that no row is seen twice or missed after a stop. All of it is pure CPU.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.data.batches import TrainingBatches, heldout_batches
    from trainer.data.corpus import Corpus, DataOptions, load_corpus

__all__ = ["Corpus", "DataOptions", "TrainingBatches", "heldout_batches", "load_corpus"]
__getattr__, __dir__ = lazy_names(
    __name__,
    Corpus="corpus",
    DataOptions="corpus",
    TrainingBatches="batches",
    heldout_batches="batches",
    load_corpus="corpus",
)
