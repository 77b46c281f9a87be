"""Objectives: the losses a run can learn by, one file each. A file of this folder without a title is a helper.

An entry has its record shapes, their packing into rows, its options, and its loss of a model's logits. It takes torch
from `objective`, where it is imported at its first use: a command line's choices and help are made of the entries.
"""

from shardwright.files.folder_entries import folder_entries
from shardwright.objectives.objective import Objective

DEFAULT = "sft"
OBJECTIVES: dict[str, type[Objective]] = folder_entries(__name__, __path__)  # --objective → its entry
