"""Compiled HLO, read as text.

A module's instructions, loops and collectives, and what one execution of it costs a chip. Nothing here knows of a
recipe or a model.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.compile.hlo.cost import Cost, count
    from trainer.compile.hlo.text import Module, parse

__all__ = ["Cost", "Module", "count", "parse"]
__getattr__, __dir__ = lazy_names(__name__, Cost="cost", Module="text", count="cost", parse="text")
