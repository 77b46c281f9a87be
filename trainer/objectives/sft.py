"""Supervised fine-tuning, and pretraining: the next token of text, or of the answers in samples."""

from typing import ClassVar

from shardwright.objectives.objective import (
    KTO,
    MEDIA,
    Batch,
    Number,
    Objective,
    RecordShape,
    Tensor,
    labels,
    text_shape,
)

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


_OWN_FUNCTION = {"compute_loss_func": "the function is the whole loss"}


class SupervisedTuning(Objective):
    """The model's own loss."""

    title = "SFT"
    learns = "the next token"
    shapes = SHAPES
    options: ClassVar = {
        "label_smoothing_factor": Number(
            0.0,
            "Of sft, the share of a target that is spread evenly over the vocabulary while training.",
            lambda value: 0 <= value < 1,
            "it is a share",
            _OWN_FUNCTION,
        ),
        "z_loss": Number(
            0.0,
            "Of sft, add so many times the mean square of the logits' logsumexp while training (PaLM: 0.0001).",
            lambda value: value >= 0,
            "it is a weight",
            _OWN_FUNCTION,
        ),
    }

    @property
    def token_terms(self) -> tuple[float, float]:
        return self.numbers["label_smoothing_factor"], self.numbers["z_loss"]

    def counts(self, batch: Batch) -> Tensor:
        """The scored targets, 0-d."""
        return labels.scored_tokens(batch["labels"])
