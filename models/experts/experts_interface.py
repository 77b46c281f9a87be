"""Experts for transformers' experts interface, under the names ``dense``, ``capacity`` and ``dropless``.

They are registered once, at import, and serve every model under that interface (about 60 families). An attribute of the
module holds its kernel (:func:`bind`), so models with different layouts can live in one process.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from shardwright.models.experts.capacity import Capacity
from shardwright.models.experts.dropless import Dropless
from shardwright.models.experts.input_scaling import ScaledExperts
from shardwright.models.experts.projections import dense

# the attribute of an experts module that holds its kernel
_KERNEL = "_shardwright_experts_kernel"


def choose(model: PreTrainedModel, name: str) -> None:
    """Make the experts of ``model`` run ``name``: ``dense``, ``capacity``, ``dropless`` or transformers' ``eager``."""
    scaled = [module for module in model.modules() if isinstance(module, ScaledExperts)]
    for experts in scaled:
        experts.implementation = "dense" if name == "eager" else name  # exact too; transformers has no eager for them
    if not scaled:
        model.set_experts_implementation(name)


def bind(model: nn.Module, names: Iterable[str], kernel: Capacity | Dropless) -> None:
    """Make the experts modules ``names`` of ``model``, and of its copies, run ``kernel``, once it is chosen by name."""
    for name in names:
        setattr(model.get_submodule(name), _KERNEL, kernel)


def _bound(name: str, default: Capacity | Dropless, experts: Any, *args: Tensor) -> Tensor:
    kernel = getattr(experts, _KERNEL, default)
    if type(kernel) is not type(default):
        raise ValueError(f"experts {name!r} on a module that is bound to {type(kernel).__name__}: bind it anew")
    return kernel(experts, *args)


ALL_EXPERTS_FUNCTIONS.register("dense", dense)
ALL_EXPERTS_FUNCTIONS.register("capacity", partial(_bound, "capacity", Capacity(factor=1.25)))
ALL_EXPERTS_FUNCTIONS.register("dropless", partial(_bound, "dropless", Dropless()))
