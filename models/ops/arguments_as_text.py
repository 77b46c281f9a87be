"""Values as text, for operations of ``torch.library``, which take only tensors, numbers and text.

Any other value is passed as text and read back inside. Equal values have equal texts in every process.
"""

import dataclasses
import functools
import json
import pkgutil
from collections.abc import Hashable
from typing import Any

_ATOMS = (type(None), bool, int, float, str)


def as_text(value: Any) -> str:
    """Return the text of None, a bool, int, float or str, or of a tuple or importable frozen dataclass of such values.

    Raises:
        TypeError: the value holds anything else (names its type).
    """
    return json.dumps(_encoded(value), separators=(",", ":"))


# The bound is far above what a run uses. A text that was dropped is decoded again, to an equal value.
@functools.lru_cache(maxsize=4096)
def from_text(text: str) -> Any:
    """Invert :func:`as_text`."""
    return _decoded(json.loads(text))


def _encoded(value: Any) -> Any:
    """Return tuples as lists, and dataclasses as objects with the one key ``module:name``."""
    # exact types: a subclass (a NamedTuple, an enum) would come back as its base
    if type(value) in _ATOMS:
        return value
    if type(value) is tuple:
        return [_encoded(entry) for entry in value]
    kind = type(value)
    if dataclasses.is_dataclass(kind) and issubclass(kind, Hashable):  # a dataclass that is not frozen has no hash
        fields = {field.name: _encoded(getattr(value, field.name)) for field in dataclasses.fields(kind)}
        return {f"{kind.__module__}:{kind.__qualname__}": fields}
    raise TypeError(f"a {kind.__name__} has no text: only plain values, tuples and frozen dataclasses have one")


def _decoded(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(entry) for entry in value)
    if isinstance(value, dict):
        ((kind, fields),) = value.items()
        return pkgutil.resolve_name(kind)(**{name: _decoded(field) for name, field in fields.items()})
    return value
