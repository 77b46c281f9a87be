"""Shardwright trains Hugging Face models across TPU pods from a sharding recipe that a person can read.

The names that a recipe is written with are imported at once, and load neither torch nor transformers. The other public
names are imported on first use (PEP 562). `docs/reference/api.md` lists what a program may import.
"""

import importlib
import logging
import os
from typing import TYPE_CHECKING, Any

from shardwright.errors import UserError
from shardwright.hosts.user import name_user
from shardwright.layout.mesh import Mesh
from shardwright.layout.placement import Replicate, Shard
from shardwright.layout.recipe import Compute, Recipe
from shardwright.xla import cuda, light_imports

if TYPE_CHECKING:
    from shardwright.arguments.training import TrainingArguments
    from shardwright.job import Job
    from shardwright.loop import TrainingLoop
    from shardwright.own_loop.accelerator import Accelerator
    from shardwright.run import train
    from shardwright.trainer import Trainer
    from shardwright.trl_trainers import (
        DPOConfig,
        DPOTrainer,
        KTOConfig,
        KTOTrainer,
        RewardConfig,
        RewardTrainer,
        SFTConfig,
        SFTTrainer,
    )

__all__ = ["Compute", "Mesh", "Recipe", "Replicate", "Shard", "UserError", "__version__"]
__all__ += ["Accelerator", "Job", "Trainer", "TrainingArguments", "TrainingLoop", "train"]
__all__ += ["DPOConfig", "DPOTrainer", "KTOConfig", "KTOTrainer"]
__all__ += ["RewardConfig", "RewardTrainer", "SFTConfig", "SFTTrainer"]
__version__ = "0.1.0"  # pyproject.toml reads it here
# public name → its module
_LATER = {
    **{f"{name}{kind}": "trl_trainers" for name in ("DPO", "KTO", "Reward", "SFT") for kind in ("Config", "Trainer")},
    "Accelerator": "own_loop.accelerator",
    "Job": "job",
    "Trainer": "trainer",
    "TrainingArguments": "arguments.training",
    "TrainingLoop": "loop",
    "train": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        if name.endswith(("Trainer", "Config", "TrainingArguments")):
            importlib.import_module(f"{__name__}.upstream.absent_names").check_class(name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with light_imports.uncollected():
        value = getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    globals()[name] = value  # the next look-up finds it there
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})


name_user()  # before torch is imported
cuda.choose()  # before torch_xla is
light_imports.put_off()
# XLA's C++ log tells of its own deprecations at every compile; errors still show
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

# When torch_xla is imported it logs which device it takes (torch_xla/runtime.py, torch_xla 2.9). A run says so itself.
logging.getLogger().addFilter(lambda record: not str(record.msg).startswith("Defaulting to PJRT_DEVICE="))
