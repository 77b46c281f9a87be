"""Lines on the terminal, escaped, and without markup: rich would take a path such as ``exp[lr=1e-3]`` for it."""

from collections.abc import Iterable
from typing import IO

from rich.console import Console
from rich.segment import Segment
from rich.status import Status
from rich.text import Text

from shardwright.report.escapes import escaped


class Terminal(Console):
    """A rich console whose texts are escaped, and nothing of its own."""

    def _past_escapes(self) -> IO[str]:
        # a stream that escapes everything takes what is escaped already by this attribute (hosts.output_streams)
        file = Console.file.fget(self)  # type: ignore[attr-defined]
        return getattr(file, "unescaped", file)

    file = property(_past_escapes, Console.file.fset)  # type: ignore[assignment,attr-defined]

    def _render_buffer(self, buffer: Iterable[Segment]) -> str:  # semi-private: rich/console.py, rich 14.1 to 15.0
        return super()._render_buffer(
            part if part.control else Segment(escaped(part.text), part.style) for part in buffer
        )


def say(console: Console, text: str) -> None:
    """Print ``text`` unchanged and unwrapped: a terminal breaks its own lines, and a file keeps them whole."""
    console.print(Text(text), soft_wrap=True)


def waiting(console: Console, text: str) -> Status:
    """A context that shows ``text`` with a spinner, on a terminal only."""
    return console.status(Text(text))
