"""Escapes for text that data, models or file names bring: a terminal would take orders from it.

Escape sequences move the cursor, hide lines, fill the clipboard.
"""

import re

# control characters but tab and newline, other line breaks, marks that turn the direction of text, halves of a pair
_ORDERS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escaped(text: str) -> str:
    r"""``text`` with what a terminal would obey in JSON's way, ``\u001b``."""
    return _ORDERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
