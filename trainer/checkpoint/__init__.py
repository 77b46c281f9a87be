"""A run's checkpoints: all that it needs to go on as if it had never stopped.

They are written while training goes on, and are whole or not there at all. Their shards are read back onto any mesh.
The tensors are in the format of `torch.distributed.checkpoint`.
"""

from typing import TYPE_CHECKING

from trainer.lazy_names import lazy_names

if TYPE_CHECKING:
    from trainer.checkpoint.read import RunCheckpoint, find_checkpoint
    from trainer.checkpoint.write import CheckpointWriter

__all__ = ["CheckpointWriter", "RunCheckpoint", "find_checkpoint"]
__getattr__, __dir__ = lazy_names(__name__, CheckpointWriter="write", RunCheckpoint="read", find_checkpoint="read")
