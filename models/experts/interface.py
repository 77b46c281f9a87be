"""Functions made known to transformers' experts interface."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS


def register_experts(name: str, function: Callable[..., torch.Tensor]) -> None:
    """Make ``function`` known to transformers as ``name`` (for ``model.set_experts_implementation``)."""
    ALL_EXPERTS_FUNCTIONS.register(name, function)
