"""Values as text and back."""

import base64
import functools
import pickle
from typing import Any


def as_text(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


@functools.lru_cache(maxsize=4096)
def from_text(text: str) -> Any:
    return pickle.loads(base64.b64decode(text))
