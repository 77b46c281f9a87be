"""The loss of a model's MTP layers (:mod:`shardwright.models.layers.mtp`), computed while the model runs.

Shape legend: B rows, S tokens in a row, H hidden, V vocabulary.
"""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel
from transformers.masking_utils import create_causal_mask

from shardwright.models.layers.decoder_layers import DecoderLayers
from shardwright.models.layers.mtp import trunk_and_behind
from shardwright.models.ops.labels import IGNORE, further_targets

# (tokens or labels [B, S], what stands behind a row's end) -> the same in the order in which the model sees rows
Order = Callable[[Tensor, int], Tensor]
# (normed hidden states [B, S, H], labels [B, S]) -> the summed cross entropy of the model's head, 0-d
Score = Callable[[Tensor, Tensor], Tensor]


@contextlib.contextmanager
def predicting(
    model: PreTrainedModel, batch: Mapping[str, Tensor], tokens: Tensor, order: Order | None, score: Score
) -> Iterator[list[Tensor]]:
    """Inside, each call of ``model`` on ``batch`` appends its MTP layers' losses, 0-d, to the list that is given.

    That of layer k is the cross entropy of the label k + 1 tokens ahead, where it is scored and of the same document,
    summed and divided by ``tokens``: by what the next token's loss is divided by, as in DeepSeek-V3's report. Without
    ``order`` the model sees rows as they are in ``batch``.
    """
    decoder: Any = model.get_decoder()
    losses, trunk = list[Tensor](), dict[str, Any]()

    def keep(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        assert not args, "transformers' models call their decoders by keywords"
        trunk.update(kwargs, hidden=output.last_hidden_state)

    def predict(*_: Any) -> None:
        losses.extend(loss / tokens for loss in _losses(model, decoder, trunk, batch, order or (lambda t, _: t), score))

    hooks = [decoder.register_forward_hook(keep, with_kwargs=True), model.register_forward_hook(predict)]
    try:
        yield losses
    finally:
        for hook in hooks:
            hook.remove()


def _losses(
    model: PreTrainedModel,
    decoder: Any,
    trunk: dict[str, Any],
    batch: Mapping[str, Tensor],
    order: Order,
    score: Score,
) -> Iterator[Tensor]:
    hidden, ids = trunk.pop("hidden"), batch["input_ids"]
    given = _layer_inputs(decoder, trunk, hidden)
    for depth, layer in enumerate(_behind(decoder.layers), start=1):
        # behind a row's or a document's end stands another token, which only positions without a target see
        ahead = order(pad(ids[:, depth:], (0, min(depth, ids.shape[1]))), 0)
        hidden = layer(hidden, embeddings=model.get_input_embeddings()(ahead), **given)
        yield score(hidden, order(further_targets(batch, depth), IGNORE))


def _behind(layers: nn.ModuleList) -> list[Callable[..., Tensor]]:
    return list(layers.behind if isinstance(layers, DecoderLayers) else trunk_and_behind(layers)[1])


def _layer_inputs(decoder: Any, trunk: dict[str, Any], hidden: Tensor) -> dict[str, Any]:
    """The arguments of a layer with attention beside ``hidden`` [B, S, H], as the decoder makes them of its own."""
    positions = trunk.get("position_ids")
    if positions is None:
        positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
    # by place: the cache has one name in transformers 5.23 and another in 5.24
    mask = create_causal_mask(decoder.config, hidden, trunk.get("attention_mask"), None, position_ids=positions)
    parameters = inspect.signature(decoder.forward).parameters.values()
    own = {parameter.name for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD}
    return {
        **{name: value for name, value in trunk.items() if name not in own},
        "attention_mask": mask,
        "position_ids": positions,
        "position_embeddings": decoder.rotary_emb(hidden, positions),
    }
