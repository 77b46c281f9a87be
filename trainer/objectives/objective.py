"""Objective: the base of this folder's entries, with the functions that a step and an evaluation call.

Shape legend: B rows, S tokens in a row, V vocabulary.
"""

import functools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shardwright.files.folder_entries import LateModule, Tensor, torch

if TYPE_CHECKING:
    from shardwright.models.ops import labels
else:
    labels = LateModule("shardwright.models.ops.labels")

__all__ = ["Tensor", "labels", "torch"]  # which the entries take from here

Batch = Mapping[str, Tensor]

_LOSS_OF_ITS_OWN = {
    "compute_loss_func": "the objective is the loss, and there is one loss",
    "compute_metrics": "it is given tokens and their targets, and an evaluation adds up what the objective counts",
    "train_mtp": "MTP layers learn further tokens of a text, of which the objective says nothing",
    "predict": "it tells what the model says of each token that stands there, and the objective is another",
}
# columns of refused records: what the model would see beside the text, and whether an answer is a good one (KTO)
MEDIA = ("image", "images", "audio", "audios", "video", "videos", "pixel_values")
KTO = ("label", "kto_tag")
# a record's places in a row's segment numbers, where answers come one by one: a good one, or a bad one, and its prompt
# with another record's answer
GOOD, BAD, MISMATCHED = "good", "bad", "mismatched"
_NULLS_ARE_VALUES = ("arguments", "tools", "chat_template_kwargs")
LOST_NULLS = "nulls within tools or arguments"  # in a record's string: how many may have been values
_REFERENCE = {
    "streaming": "what the starting weights say of each row is stored beside it, and of a stream no rows are stored"
}


@dataclass(frozen=True)
class RecordShape:
    """The columns of a kind of record."""

    name: str
    required: tuple[str, ...]  # it is known by these
    optional: tuple[str, ...] = ()
    trained: str = "every token"  # the tokens that the loss is on, in words
    # strings or messages that each answer the prompt: each a segment, side by side in a row, in this order
    answers: tuple[str, ...] = ()
    unit: str = "sample"  # the word for one of it
    words: str = ""  # the columns as an error names them; empty: the required ones
    refused: tuple[str, ...] = ()  # columns that may tell that a record is of another kind
    label: str = ""  # the one of the required columns that says whether the answer is a good one: true or false
    names: tuple[tuple[str, str], ...] = ()  # (column, the records' own name for it), where that is another

    def called(self, names: Mapping[str, str]) -> Self:
        """The shape where records have the columns of ``names`` under other names."""
        return replace(self, names=tuple(sorted(names.items())))

    @functools.cached_property
    def name_of(self) -> dict[str, str]:
        """Column → the records' own name for it."""
        return {name: name for name in (*self.required, *self.optional, *self.refused)} | dict(self.names)

    @functools.cached_property
    def columns(self) -> frozenset[str]:
        """The columns of a record that are read, by the records' own names."""
        return frozenset(self.name_of.values())

    @property
    def read_as(self) -> str:
        """The columns that it is known by, and those with other names, in words."""
        if self.is_text:
            return self.name_of["text"]
        names = dict.fromkeys((*self.required, *dict(self.names)))
        return ", ".join(name if self.name_of[name] == name else f"{name}={self.name_of[name]}" for name in names)

    @property
    def is_text(self) -> bool:
        """Whether records are documents, which rows are cut from; all others are samples."""
        return self.name == "text"

    @property
    def is_chat(self) -> bool:
        return not {"messages", "conversations"}.isdisjoint(self.required)

    def document(self, record: Mapping[str, Any], typed: bool = True) -> str | None:
        """The record as one string; None for a text record without text.

        ``typed``: columns have types, so that a null within tools or their arguments may be a key of another record.
        """
        if self.is_text:
            return record[self.name_of["text"]]
        lost: list[str] = []
        values = _without_nulls({name: record.get(own) for name, own in self.name_of.items()}, lost if typed else None)
        if lost:
            values[LOST_NULLS] = len(lost)
        return json.dumps(values, ensure_ascii=False, default=str)


def text_shape(column: str = "text") -> RecordShape:
    return RecordShape("text", ("text",), names=() if column == "text" else (("text", column),))


_LEAVES = {int, float, bool, str}


def _without_nulls(value: Any, lost: list[str] | None, within: bool = False) -> Any:
    """``value`` without keys that are null: Arrow gives every message the keys of all others.

    ``within``: they are values, and stay; but for a ``lost`` that gets them, where they may be Arrow's.
    """
    if isinstance(value, Mapping):
        if lost is not None and within:
            lost += [key for key, inner in value.items() if inner is None]
        return {
            key: _without_nulls(inner, lost, within or key in _NULLS_ARE_VALUES)
            for key, inner in value.items()
            if inner is not None or (within and lost is None)
        }
    if not isinstance(value, list | tuple) or set(map(type, value)) <= _LEAVES:  # tokens: millions, and no null
        return value
    return [_without_nulls(inner, lost, within) for inner in value]


@dataclass(frozen=True)
class Number:
    """An option that only some objectives have; those that share a name share the number."""

    default: float
    help: str
    fits: Callable[[float], bool]
    why: str  # what kind of number it is, for a value that does not fit
    refuses: Mapping[str, str] = field(default_factory=dict)  # what can't be combined with another value → why


@dataclass(frozen=True)
class Choice:
    """An option in words that only some objectives have; each that has it has its own words. Unset it is None."""

    known: tuple[str, ...]  # the words to choose from, the first by default; none: the objective checks what is given
    help: str
    several: bool = False  # whether there may be more than one, with commas between them

    def read(self, value: str | None) -> tuple[str, ...]:
        """The words of the option's value."""
        if value is None:
            return self.known[:1]
        return tuple(word.strip() for word in value.split(",")) if self.several else (value,)


class Objective:
    """An objective. An entry is a subclass with a title.

    Attributes:
        learns: the thing learned, in words.
        numbers: its options that are numbers, by name.
        words: its options in words, by name; each may have several.
        length: tokens of a row at most.
        shapes: the records that it reads, in the order in which they are recognised.
        parts: names of the parts of the loss, as many as :meth:`counts` has numbers. Empty: the loss is the model's
            own, the mean cross entropy of the scored targets, and :meth:`counts` their number, 0-d.
        logged: names of values logged beside the loss: means, divided by the first count, unless :meth:`means` says
            otherwise.
        further: numbers that :meth:`counts` has behind those of the parts, for logged values alone.
        reference: the one of :attr:`columns` that holds the starting weights' values; None: it needs none.
        teacher: the one that holds another model's values, as :meth:`refer` gives them; None: there is no such model.
        refuses: option → why it can't be combined with this objective.
        scores_texts: the model has a score in place of its head: its logits are [B, S, 1].
        overflow: what becomes of samples longer than a row, unless ``--overflow`` says it.
        padding: the tokenizer's padding token; -1: it has none, or there is no tokenizer yet.
    """

    title: ClassVar[str]
    learns: ClassVar[str]
    options: ClassVar[Mapping[str, Number | Choice]] = {}
    shapes: ClassVar[tuple[RecordShape, ...]]
    refuses: ClassVar[Mapping[str, str]] = {}
    parts: ClassVar[tuple[str, ...]] = ()
    logged: ClassVar[tuple[str, ...]] = ()
    further: ClassVar[int] = 0
    reference: ClassVar[str | None] = None
    scores_texts: ClassVar[bool] = False
    overflow: ClassVar[str] = "truncate_right"
    padding: int = -1
    teacher: ClassVar[str | None] = None

    def __init__(self, values: Mapping[str, Any], length: int) -> None:
        """``values`` of the options by name; one that is not among them has its default."""
        own = self.options.items()
        self.numbers: Mapping[str, float] = {
            name: values.get(name, option.default) for name, option in own if isinstance(option, Number)
        }
        self.words = {name: option.read(values.get(name)) for name, option in own if isinstance(option, Choice)}
        self.length = length

    def check(self) -> None:
        """Raise UserError if the values of the options, each good by itself, do not go together."""

    @classmethod
    def refusals(cls) -> dict[str, str]:
        reference = _REFERENCE if cls.reference else {}
        return {**(_LOSS_OF_ITS_OWN if cls.parts else {}), **reference, **cls.refuses}

    @property
    def groups(self) -> int | None:
        """The most records that share a row, where the loss tells its segments apart, as a dimension of its tensors."""
        return None

    @property
    def whole_batch(self) -> str:
        """The option, as it is written, by which a record's loss depends on the others of its micro-batch; or empty.

        A step must then have but one.
        """
        return ""

    @property
    def token_terms(self) -> tuple[float, float]:
        """Label smoothing of the model's own loss while it trains, and the coefficient of a z-loss; 0: none."""
        return 0.0, 0.0

    @property
    def segments(self) -> tuple[str, ...]:
        """The places that each record has in a row's segment numbers; empty: its answers are numbered as they come."""
        return ()

    @property
    def columns(self) -> Mapping[str, tuple[int, ...]]:
        """Batch columns for the loss alone: name → shape of a row's values, float32. The model does not see them."""
        return {}

    def counts(self, batch: Batch) -> Tensor:
        """The divisors of the parts of the loss, from tensors [..., S]: float [parts + further].

        A step's micro-batches are counted together, so that each weighs as much as it has of them.
        """
        raise NotImplementedError

    def loss(self, logits: Tensor, batch: Batch, counts: Tensor) -> dict[str, Tensor]:
        """Each of :attr:`parts` and :attr:`logged` of a micro-batch, 0-d, from logits [B, S, V].

        The loss is the sum of the parts; ``counts`` are :meth:`counts` of whatever micro-batches.
        """
        raise NotImplementedError

    def means(self, sums: Mapping[str, float], counts: Sequence[float]) -> dict[str, float]:
        """The values of :attr:`logged` of many batches, NaN for one of nothing.

        ``sums`` are of what :meth:`loss` gives them with counts of 1, and ``counts`` those of all the batches.
        """
        return {name: sums[name] / (counts[0] or math.nan) for name in self.logged}

    def balanced(self, batch: Batch) -> Tensor:
        """1 for the tokens of packed rows that the model's load-balancing loss is on, else 0. [B, S]"""
        return batch["segment_ids"].clamp(max=1)

    def refer(self, logits: Tensor, batch: Batch) -> Tensor:
        """The values of column :attr:`reference` [B, ...] by the starting weights' logits [B, S, V]."""
        raise NotImplementedError
