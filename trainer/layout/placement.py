"""``Shard`` and ``Replicate``: DTensor's own placements, under names that load torch only when one is made.

``Shard(0)`` returns a ``torch.distributed.tensor.Shard(0)``, and ``isinstance`` accepts that class. So Mesh, Compute
and Recipe can be imported without torch, which takes seconds.
"""

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.tensor import Replicate, Shard
else:

    class _DTensors(type):
        """The type of a stand-in for the class of the same name in ``torch.distributed.tensor``."""

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            import torch.distributed.tensor

            return getattr(torch.distributed.tensor, cls.__name__)(*args, **kwargs)

        def __instancecheck__(cls, instance: object) -> bool:
            dtensor = sys.modules.get("torch.distributed.tensor")  # not loaded: nothing is an instance yet
            return dtensor is not None and isinstance(instance, getattr(dtensor, cls.__name__))

    class Shard(metaclass=_DTensors):
        """``Shard(dim)``: an axis cuts dimension ``dim`` of a tensor into equal parts."""

    class Replicate(metaclass=_DTensors):
        """``Replicate()``: every device along an axis holds the whole tensor."""


Placement = Shard | Replicate
