"""Supervised fine-tuning, and pretraining: the next token of text, or of the answers in samples."""

from shardwright.objectives.objective import Batch, Objective, RecordShape, Tensor, text_shape

_TURNS = "the assistant's turns"
# in this order: a set with a rendered `text` beside its messages is a set of messages
SHAPES = (
    RecordShape("messages", ("messages",), ("tools",), _TURNS),
    RecordShape("conversations", ("conversations",), ("system", "tools"), _TURNS),
    RecordShape("prompt/completion", ("prompt", "completion"), ("tools",), "the completion", ("completion",)),
    RecordShape("instruction/output", ("instruction", "output"), ("input", "system"), "the output"),
    text_shape(),
    RecordShape("input_ids", ("input_ids",), ("labels",), "every token, or its labels"),
)


class SupervisedTuning(Objective):
    """The model's own loss."""

    title = "SFT"
    learns = "the next token"
    shapes = SHAPES

    def counts(self, batch: Batch) -> Tensor:
        """The scored targets, 0-d."""
        from shardwright.models.ops.labels import scored_tokens

        return scored_tokens(batch["labels"])
