"""Optimizers: one file each. The file's name is what ``--optim`` takes.

An entry has a title, its numbers, its state of a parameter and its update rule. It imports torch inside its functions:
a command line's choices and help are made of the entries.
"""

from shardwright.files.folder_entries import folder_entries
from shardwright.optimizers.optimizer import Optimizer

OPTIMIZERS: dict[str, type[Optimizer]] = folder_entries(__name__, __path__)  # --optim → its entry
