"""Replacements of operations that torch_xla lowers badly or not at all.

In routers one-hots, which the compiler fuses away, replace scatters over tokens, for which the partitioner gathers the
indices of the whole batch on every device. `torch.polar` would fall back to the host. `torch.std` has no gradient on
XLA: torch_xla 2.9 replaces it below autograd.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


class _TopK(torch.autograd.Function):
    """`torch.topk` over the last dimension, whose gradient is a sum of one-hots."""

    @staticmethod
    def forward(ctx, x: Tensor, k: int, sort: bool) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        values, index = torch.topk(x, k, dim=-1, sorted=sort)
        ctx.save_for_backward(index)
        ctx.mark_non_differentiable(index)
        ctx.choices = x.shape[-1]
        return values, index

    @staticmethod
    def backward(ctx, grad: Tensor, _: Any):  # type: ignore[override]
        (index,) = ctx.saved_tensors
        chosen = index.unsqueeze(-1) == torch.arange(ctx.choices, device=index.device)
        return (chosen.to(grad.dtype) * grad.unsqueeze(-1)).sum(-2), None, None


class LocalOps(TorchFunctionMode):
    """Replaces, while active, torch's `topk` over the last dimension, `histc` of integers, `polar` and `std`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(func, func)(*args, **(kwargs or {}))


def _top_k(input: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
    if dim not in (-1, input.dim() - 1) or not largest or not input.requires_grad:
        return torch.topk(input, k, dim, largest, sorted)
    return torch.return_types.topk(_TopK.apply(input, k, sorted))


def _histogram(input: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    # transformers counts each expert's tokens with it, and XLA has no `histc`
    if (min, max) != (0, bins) or input.is_floating_point():
        return torch.histc(input, bins=bins, min=min, max=max)
    return (input.flatten().unsqueeze(-1) == torch.arange(bins, device=input.device)).to(torch.float32).sum(0)


def _polar(abs: Tensor, angle: Tensor) -> Tensor:
    return torch.view_as_complex(torch.stack((abs * angle.cos(), abs * angle.sin()), dim=-1))


def _std(*args: Any, **kwargs: Any) -> Tensor:
    """`torch.std`, with a gradient of 0 where it is 0."""
    variance = torch.var(*args, **kwargs)
    positive = variance > 0
    return torch.where(positive, torch.where(positive, variance, 1).sqrt(), 0)


_REPLACED: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((torch.topk, Tensor.topk), _top_k),
    **dict.fromkeys((torch.histc, Tensor.histc), _histogram),
    **dict.fromkeys((torch.std, Tensor.std), _std),
    torch.polar: _polar,
}
