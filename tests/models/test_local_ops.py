"""Operations that are computed in other ways on XLA have torch's own values and gradients."""

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torch_xla

from shardwright.models.ops.torch_overrides import LocalOps
from shardwright.xla.runtime import init_runtime

ROWS = torch.cat([torch.randn(3, 8, generator=torch.Generator().manual_seed(0)), torch.full((1, 8), 2.0)])


def gradient(x: torch.Tensor, unbiased: bool) -> tuple[torch.Tensor, torch.Tensor]:
    x = x.clone().requires_grad_()
    spread = x.std(dim=-1, keepdim=True, unbiased=unbiased)
    (spread * torch.arange(4, device=x.device).unsqueeze(1)).sum().backward()
    assert x.grad is not None
    return spread.detach().cpu(), x.grad.cpu()


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_standard_deviation_has_its_gradient(unbiased: bool) -> None:
    with LocalOps():
        found = gradient(ROWS.to(torch_xla.device()), unbiased)
    for ours, expected in zip(found, gradient(ROWS, unbiased), strict=True):
        torch.testing.assert_close(ours, expected)


FUNCTIONS = {
    "kl_div": lambda x: F.kl_div(x.log_softmax(-1), torch.full_like(x, 1 / 8), reduction="batchmean"),
    "std": lambda x: x[:3].std() + x[:3].std(dim=-1).sum() + x[:3].std(dim=-1, unbiased=False).sum(),
    "cross": lambda x: torch.cross(x[:, :3], x[:, 3:6], dim=1).square().sum(),
    "diag": lambda x: torch.diag(x).square().sum(),
    "inverse": lambda x: torch.inverse(x[:3, :3]).sum(),
    "elu": lambda x: F.elu(x, alpha=1.5).sum(),
    "celu": lambda x: F.celu(x, alpha=2.0).sum(),
    "selu": lambda x: torch.selu(x).sum(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_loss_of_ones_own_has_torchs_value_and_gradient(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    init_runtime()
    plain, ours = ROWS.clone().requires_grad_(), ROWS.to(torch_xla.device()).requires_grad_()
    losses = [function(x) for x in (plain, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(losses[1].detach().cpu(), losses[0].detach())
    assert plain.grad is not None
    assert ours.grad is not None
    torch.testing.assert_close(ours.grad.cpu(), plain.grad)


def test_an_operation_that_would_lose_its_gradient_stops_a_run() -> None:
    x = ROWS.to(torch_xla.device()).requires_grad_()
    with warnings.catch_warnings():
        warnings.resetwarnings()
        warnings.filterwarnings("ignore", "torch.qr is deprecated")
        init_runtime()
        with pytest.raises(UserWarning, match="autograd kernel was not registered"):
            torch.qr(x).R.sum().backward()
