"""Reordering of rows whose tokens are split over devices.

Rows are reordered inside the graph, around the model's call. Outside, batches and logits have a row's own order: token
ids are small, and every device of a row is given all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from shardwright.models.attention.pieces import from_pieces, to_pieces
from shardwright.models.ops.head_loss import TokenLayout, head_loss
from shardwright.models.ops.token_loss import TokenTerms
from shardwright.xla import sharding
from shardwright.xla.device_mesh import DeviceMesh, device_order


@dataclass(frozen=True)
class RowPieces:
    """The order of `models.attention.pieces` on ``axis`` of ``mesh``, whose batches lie on ``batch_axes``."""

    mesh: DeviceMesh
    batch_axes: tuple[str, ...]
    axis: str

    @property
    def count(self) -> int:
        return self.mesh.shape()[self.axis]

    def inputs(self, batch: Mapping[str, Any], length: int) -> dict[str, Any]:
        """``batch`` with its tensors of [rows, ``length``] in pieces, each with its tokens' positions."""
        rest = -length % (2 * self.count)  # padding to cut rows evenly, which `segment_ids` then name
        given, device = dict(batch), batch["input_ids"].device
        if "position_ids" not in given:
            positions = torch.arange(length, dtype=torch.int64, device=device)
            given["position_ids"] = positions.expand(batch["input_ids"].shape)
        if rest and "segment_ids" not in given:
            given["segment_ids"] = torch.ones_like(batch["input_ids"])
        rows = {name: t for name, t in given.items() if isinstance(t, Tensor) and t.dim() == 2 and t.shape[1] == length}
        return given | {name: self._cut(row, rest) for name, row in rows.items()}

    def targets(self, targets: Tensor, ignored: int) -> Tensor:
        return self._cut(targets, -targets.shape[1] % (2 * self.count), ignored)

    def places(self, places: Tensor) -> Tensor:
        """Places [rows, S] in a row's own order, in pieces."""
        return self._cut(places, -places.shape[1] % (2 * self.count))

    def restored(self, logits: Tensor, length: int) -> Tensor:
        """The model's logits of rows of ``length`` tokens, in a row's own order: [rows, S, V]."""
        whole = from_pieces(logits, self.count, 1)
        return sharding.constrain(whole, self.mesh, (self.batch_axes or None, self.axis, None))[:, :length]

    def head_loss(
        self, hidden: Tensor, head: Tensor, targets: Tensor, ignored: int, terms: TokenTerms
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of `models.ops.head_loss`, in pieces: for ``targets`` [rows, S], of ``head`` on ``hidden``."""
        axes = tuple(self.mesh.shape().items())
        layout = TokenLayout(axes, self.batch_axes, self.axis, device_order(self.mesh), ignored)
        return head_loss(hidden, head, targets, layout, terms)

    def _cut(self, rows: Tensor, rest: int, value: int = 0) -> Tensor:
        cut = to_pieces(pad(rows, (0, rest), value=value), self.count, 1)
        return sharding.constrain(cut, self.mesh, (self.batch_axes or None, self.axis))
