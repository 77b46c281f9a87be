"""Plain lines on the terminal: rich would take a path such as ``exp[lr=1e-3]`` for markup."""

from rich.console import Console
from rich.status import Status
from rich.text import Text


def say(console: Console, text: str) -> None:
    """Print ``text`` unchanged and unwrapped: a terminal breaks its own lines, and a file keeps them whole."""
    console.print(Text(text), soft_wrap=True)


def waiting(console: Console, text: str) -> Status:
    """A context that shows ``text`` with a spinner, on a terminal only."""
    return console.status(Text(text))
