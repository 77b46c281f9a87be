"""Shardwright trains Hugging Face models across TPU pods from a sharding recipe that a person can read.

What a recipe is written with is imported here at once, and loads neither torch nor transformers. The other public names
(Job, Trainer, TrainingArguments, TrainingLoop, train) are imported when they are first asked for. `docs/api.md` lists
them all.
"""

import logging
from typing import TYPE_CHECKING

from trainer.errors import UserError
from trainer.layout.mesh import Mesh
from trainer.layout.placement import Replicate, Shard
from trainer.layout.recipe import Compute, Recipe
from trainer.lazy_names import lazy_names
from trainer.user import name_user

if TYPE_CHECKING:
    from trainer.arguments.training import TrainingArguments
    from trainer.job import Job
    from trainer.loop import TrainingLoop
    from trainer.run import train
    from trainer.trainer import Trainer

__all__ = [
    "Compute",
    "Job",
    "Mesh",
    "Recipe",
    "Replicate",
    "Shard",
    "Trainer",
    "TrainingArguments",
    "TrainingLoop",
    "UserError",
    "train",
]
__getattr__, __dir__ = lazy_names(
    __name__,
    Job="job",
    Trainer="trainer",
    TrainingArguments="arguments.training",
    TrainingLoop="loop",
    train="run",
)

name_user()  # before torch is imported

# When torch_xla is imported it logs which device it takes (torch_xla/runtime.py, torch_xla 2.9). A run says so itself.
logging.getLogger().addFilter(lambda record: not str(record.msg).startswith("Defaulting to PJRT_DEVICE="))
