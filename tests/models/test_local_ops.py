"""Operations that are computed in other ways on XLA have torch's own values and gradients."""

import warnings

import pytest
import torch
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


def test_an_operation_that_would_lose_its_gradient_stops_a_run() -> None:
    x = ROWS.to(torch_xla.device()).requires_grad_()
    with warnings.catch_warnings():
        warnings.resetwarnings()
        init_runtime()
        with pytest.raises(UserWarning, match="autograd kernel was not registered"):
            torch.selu(x).sum().backward()
