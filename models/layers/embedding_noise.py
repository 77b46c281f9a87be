"""NEFTune (arXiv:2310.05914): uniform noise on a model's token embeddings in training, as transformers has it.

It is a function of the step's key, the row's number in the step's batch, and the place in the row: not of the mesh, of
micro-batches, or of what was drawn before.

Shape legend: B rows, S tokens in a row, H hidden.
"""

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from shardwright.models.ops.random_bits import row_noise

ROW_KEYS = "row_keys"  # a batch's column, int32 [B, 2]


@contextlib.contextmanager
def noisy_embeddings(
    model: PreTrainedModel, alpha: float, keys: Tensor, positions: Tensor, length: int
) -> Iterator[None]:
    """Inside, the first embeddings that ``model`` looks up get noise of at most alpha / sqrt(``length`` * H).

    ``positions`` [B, S] are those of the tokens in their rows, which have ``length`` tokens, padding and neighbours in
    a packed row included. Later look-ups, of MTP layers, get none.
    """
    done = False

    def add(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        nonlocal done
        if done:
            return output
        done = True
        noise = row_noise(keys, positions, output.shape[-1]) * (alpha / math.sqrt(length * output.shape[-1]))
        return output + noise.to(output.dtype)

    embeddings: Any = model.get_input_embeddings()
    hook = embeddings.register_forward_hook(add)
    try:
        yield
    finally:
        hook.remove()
