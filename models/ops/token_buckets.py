"""Some tokens' logits, and the logit of all others together: buckets of a vocabulary.

Shape legend: V vocabulary, K tokens that are buckets of their own.
"""

import torch
from torch import Tensor


def bucket_logits(logits: Tensor, ids: Tensor, temperature: float) -> Tensor:
    """The logits of ``ids`` [..., K] over ``temperature``, and of all other tokens together: float32 [..., K + 1].

    Of the vocabulary's size are the logits [..., V], which of them are apart (a byte each, until the forward ends), and
    their gradient: libtpu's compiler keeps two tensors of the logits' size at most, as with a cross entropy. With K = V
    there are no others: [..., V].
    """
    if ids.shape[-1] == logits.shape[-1]:
        return logits.to(torch.float32).gather(-1, ids) / temperature
    return _Buckets.apply(logits, ids, temperature)


class _Buckets(torch.autograd.Function):
    """Adds up the others by themselves: of 1 minus the sum of the K little would be left of a small share."""

    @staticmethod
    def forward(ctx, logits: Tensor, ids: Tensor, temperature: float) -> Tensor:  # type: ignore[override]
        top = logits.gather(-1, ids).to(torch.float32) / temperature
        taken = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, ids, True)
        others = torch.where(taken, -torch.inf, logits.to(torch.float32) / temperature)
        rest = others.logsumexp(-1, keepdim=True)
        ctx.save_for_backward(logits, ids, rest)
        ctx.temperature = temperature
        return torch.cat([top, rest], -1)

    @staticmethod
    def backward(ctx, gradient: Tensor):  # type: ignore[override]
        logits, ids, rest = ctx.saved_tensors
        of_top, of_rest = (gradient / ctx.temperature).split((ids.shape[-1], 1), -1)
        others = of_rest * (logits.to(torch.float32) / ctx.temperature - rest).exp()
        return others.to(logits.dtype).scatter(-1, ids, of_top.to(logits.dtype)), None, None
