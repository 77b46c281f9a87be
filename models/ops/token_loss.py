"""The loss of tokens with further terms while training: label smoothing and the z-loss.

Shape legend: B rows, S tokens in a row, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.models.ops.labels import IGNORE


@dataclass(frozen=True)
class TokenTerms:
    """Further terms of the loss of tokens.

    Args:
        smoothing: the share of a target that is spread evenly over the vocabulary, as transformers' `LabelSmoother`
            has it (arXiv:1512.00567).
        z: the coefficient of the mean square of the logits' logsumexp (PaLM, arXiv:2204.02311).
    """

    smoothing: float = 0.0
    z: float = 0.0


def token_loss(logits: Tensor, targets: Tensor, tokens: Tensor, terms: TokenTerms) -> tuple[Tensor, Tensor]:
    """The loss of logits [B, S, V] with ``terms``, and the z-loss without its coefficient; both 0-d.

    Sums over scored ``targets`` [B, S] are divided by ``tokens``.
    """
    flat, labels = logits.to(torch.float32).flatten(0, -2), targets.flatten()
    loss = F.cross_entropy(flat, labels, ignore_index=IGNORE, reduction="sum", label_smoothing=terms.smoothing)
    z_loss = z_losses(flat.logsumexp(-1), labels).sum() / tokens if terms.z else torch.zeros_like(loss)
    return loss / tokens + terms.z * z_loss, z_loss


def z_losses(logsumexps: Tensor, targets: Tensor) -> Tensor:
    """The z-loss of each of ``targets``, 0 where it is not scored, from the logits' logsumexp; of one shape."""
    return torch.where(targets == IGNORE, 0, logsumexps.square())
