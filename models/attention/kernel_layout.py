"""The layout of an attention kernel's inputs."""

import math
from dataclasses import dataclass

from torch import Tensor

from shardwright.models.ops.jax_call import Axes, Manual, Spec


@dataclass(frozen=True)
class KernelLayout:
    """The layout of query, key and value on the mesh while the kernel runs."""

    axes: tuple[tuple[str, int], ...] = ()  # as in `Manual`, and so is the order; none: one device
    batch_axes: Axes = ()  # they split the batch, which their sizes divide
    # They split the heads. Query heads that they do not divide are on every device. Key heads are repeated until they
    # are divided, and devices that share one hold a copy each.
    head_axes: Axes = ()
    order: tuple[int, ...] | None = None
    # it splits a row's tokens (:mod:`shardwright.models.attention.pieces`); None: rows are whole
    sequence_axis: str | None = None

    @property
    def sequence_shards(self) -> int:
        """The number of devices that share a row's tokens."""
        return 1 if self.sequence_axis is None else dict(self.axes)[self.sequence_axis]

    def split(self, heads: int) -> int:
        """The number of shards that ``heads`` query heads are cut into."""
        shards = math.prod(dict(self.axes)[axis] for axis in self.head_axes)
        return shards if heads % shards == 0 else 1

    def manual(self, heads: int, inputs: str, outputs: str) -> Manual | None:
        """The layouts of tensors for ``heads`` query heads; None on one device.

        ``inputs`` and ``outputs`` have a word for each tensor, with a letter for each of its leading dimensions:
        ``"bhs b h"`` is [batch, heads, sequence, …], [batch, …] and [heads, …].
        """
        if not self.axes:
            return None
        heads_split = self.head_axes if self.split(heads) > 1 else None
        split = {"b": self.batch_axes or None, "h": heads_split or None, "s": self.sequence_axis}

        def specs(letters: str) -> tuple[Spec, ...]:
            return tuple(tuple(split[letter] for letter in word) for word in letters.split())

        return Manual(self.axes, specs(inputs), specs(outputs), self.order)

    def shared_heads(self, heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Repeat the heads of key and value ``[B, K, S, D]`` until the axes divide them, for ``heads`` query heads."""
        keys, shards = tensors[0].shape[1], self.split(heads)
        assert heads % keys == 0
        copies = shards // math.gcd(keys, shards)
        if copies == 1:
            return tensors
        return tuple(
            t.unsqueeze(2).expand(-1, -1, copies, -1, -1).reshape(t.shape[0], -1, *t.shape[2:]) for t in tensors
        )
