"""The token order of a row that is split over devices.

Under a causal mask a row's last tokens have the most work. So a row is cut into 2·n pieces for n devices, and device i
holds pieces i and 2n-1-i: every device's two pieces see equally many tokens.
"""

import torch
from torch import Tensor


def to_pieces(row: Tensor, devices: int, dim: int) -> Tensor:
    """Put the tokens of dimension ``dim`` of ``row`` into the devices' order; 2 · ``devices`` divides their number."""
    parts = _parts(row, (2 * devices,), dim)
    first, last = parts.split(devices, dim)
    return torch.stack([first, last.flip(dim)], dim + 1).reshape(row.shape)


def from_pieces(pieces: Tensor, devices: int, dim: int) -> Tensor:
    """Invert :func:`to_pieces`."""
    first, last = _parts(pieces, (devices, 2), dim).unbind(dim + 1)
    return torch.cat([first, last.flip(dim)], dim).reshape(pieces.shape)


def numbers(devices: int, device: torch.device) -> Tensor:
    """The numbers of the pieces in the devices' order, int32 [2 · devices]: 0, 2n-1, 1, 2n-2, …"""
    return to_pieces(torch.arange(2 * devices, dtype=torch.int32, device=device), devices, 0)


def _parts(tensor: Tensor, counts: tuple[int, ...], dim: int) -> Tensor:
    return tensor.reshape(*tensor.shape[:dim], *counts, -1, *tensor.shape[dim + 1 :])
