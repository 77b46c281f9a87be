"""Fields of records that have no effect on tokens or labels: their names in tallies, and what is said of them."""

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from shardwright.objectives.objective import MEDIA, RecordShape

NOT_READ = "not read "  # in a tally: not read NAME (TYPE) → how often it was met
# keys of a turn beside its content
SAYS = frozenset({"reasoning", "reasoning_content", "thinking", "tool_calls", "function_call"})
# fields that say what is learned, or that the model is to see: without them something else is trained
_MEANT = SAYS.union(
    (*MEDIA, "content", "tools", "system", "history", "documents"),
    ("weight", "weights", "train", "training", "loss", "mask", "loss_mask", "margin"),
    ("attention_mask", "completion_mask", "assistant_mask", "assistant_masks"),
)


def is_empty(value: Any) -> bool:
    """Whether a field holds nothing that could be lost; False and 0 are something."""
    return value is None or (isinstance(value, str | list | tuple | dict) and not value)


def named(name: str, value: Any) -> str:
    return f"{name} ({type(value).__name__})"


def is_meant(field: str) -> bool:
    """Whether something else is trained without the field, as :func:`named` writes it."""
    words = field.partition(" (")[0].split(".")
    return words[-1] in _MEANT or "arguments" in words[:-1]


def unread_columns(record: Mapping[str, Any], shape: RecordShape) -> list[str]:
    """The names of the columns that hold something and are not read, where records are of ``shape``."""
    return [named(n, value) for n, value in record.items() if n not in shape.columns and not is_empty(value)]


def unread_features(features: Mapping[str, Any], shape: RecordShape) -> list[str]:
    """Like :func:`unread_columns`, by the columns' types."""
    types = {name: getattr(feature, "dtype", None) or type(feature).__name__ for name, feature in features.items()}
    return [f"{n} ({kind})" for n, kind in types.items() if n not in shape.columns and kind != "null"]


def unread_of(tally: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """(field, count) of those in a tally."""
    return (
        (name.removeprefix(NOT_READ), count) for name, count in tally.items() if name.startswith(NOT_READ) and count
    )


def counted(fields: Mapping[str, int]) -> Counter[str]:
    """The fields as a tally names them."""
    return Counter({NOT_READ + name: count for name, count in fields.items()})
