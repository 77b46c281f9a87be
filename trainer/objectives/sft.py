"""Supervised fine-tuning, and pretraining: the next token of text, or of the answers in samples."""

from shardwright.objectives.objective import KTO, MEDIA, Batch, Objective, RecordShape, Tensor, text_shape

_TURNS = "the assistant's turns"
# in this order: a set with a rendered `text` beside its messages is a set of messages
_RENDERED = ("tools", "chat_template_kwargs")
_ASKED = ("input", "system", "history", "chat_template_kwargs")
# of tokens: the one of padding, and those of answers
MASKS = ("attention_mask", "completion_mask", "assistant_masks")
_REFUSED = (*MEDIA, *KTO)
SHAPES = (
    RecordShape("messages", ("messages",), ("system", *_RENDERED), _TURNS, refused=_REFUSED),
    RecordShape("conversations", ("conversations",), ("system", *_RENDERED), _TURNS, refused=_REFUSED),
    RecordShape(
        *("prompt/completion", ("prompt", "completion"), _RENDERED, "the completion", ("completion",)),
        refused=_REFUSED,
    ),
    RecordShape("instruction/output", ("instruction", "output"), _ASKED, "the output", refused=_REFUSED),
    text_shape(),
    RecordShape("input_ids", ("input_ids",), ("labels", *MASKS), "every token, or its labels", refused=MEDIA),
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
