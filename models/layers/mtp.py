"""Multi-token prediction (MTP): layers behind a decoder's last one, each of which guesses a token further ahead.

Layer k joins the hidden state of a token with the embedding of the k-th token after it, both normed, and runs one
decoder layer of its family on that (DeepSeek-V3, arXiv:2412.19437, section 2.2; GLM-4.5, arXiv:2508.06471). The layers
lie in the decoder's own list, behind those that it runs: a recipe's lines for layers fit them, and so do most of the
hub's names.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.models.swapped_methods import swap_methods

Value = TypeVar("Value")


@dataclass(frozen=True)
class MtpFormat:
    """The MTP layers in the checkpoints of a family.

    Args:
        count: the config's field that counts them; None: there is always one, and the config does not say so.
        names: pairs of the hub's prefix and what takes its place behind the layer's name, the closest first; empty: the
            hub names the layer by its number in the decoder's list, as the model does.
        copies: whether the files hold the embedding and the head once more within each layer.
    """

    count: str | None = None
    names: tuple[tuple[str, str], ...] = ()
    copies: bool = False


_NUMBERED = MtpFormat(count="num_nextn_predict_layers", copies=True)
_APART = MtpFormat(
    names=(
        ("mtp.fc.", "eh_proj."),
        ("mtp.pre_fc_norm_embedding.", "enorm."),
        ("mtp.pre_fc_norm_hidden.", "hnorm."),
        ("mtp.norm.", "shared_head.norm."),
        ("mtp.layers.0.", ""),
    )
)
FORMATS: Mapping[str, MtpFormat] = {"deepseek_v3": _NUMBERED, "glm4_moe": _NUMBERED, "qwen3_next": _APART}  # model_type
_COPIES = ("embed_tokens.", "shared_head.head.")


class MtpLayer(nn.Module):
    """A decoder layer with what makes it an MTP layer; a layer's class is this one and its family's.

    Attributes:
        enorm, hnorm: norms of the embedding and of the hidden state.
        eh_proj: joins the two, of twice the width, to one; the embedding comes first, as in the published weights.
        shared_head: the ``norm`` before the head, which is the model's own.
    """

    enorm: nn.Module
    hnorm: nn.Module
    eh_proj: nn.Module
    shared_head: nn.ModuleDict

    def forward(self, hidden_states: Tensor, *args: Any, embeddings: Tensor, **kwargs: Any) -> Tensor:
        """Map [B, S, H], the trunk's after its last norm or a layer's before, and the tokens' ``embeddings`` likewise.

        What the head is to be applied to is returned, and is the next layer's input.
        """
        joined = self.eh_proj(torch.cat([self.enorm(embeddings), self.hnorm(hidden_states)], dim=-1))
        output = super().forward(joined, *args, **kwargs)  # type: ignore[misc]  # the family's
        normed: Tensor = self.shared_head["norm"](output)
        return normed


def count_of(config: PretrainedConfig) -> int:
    """The number of MTP layers in a checkpoint of ``config``; 0 also for a family that is not in the table."""
    known = FORMATS.get(config.model_type)
    if known is None:
        return 0
    return 1 if known.count is None else int(getattr(config, known.count, 0) or 0)


def builder(build: Callable[..., PreTrainedModel]) -> Callable[..., PreTrainedModel]:
    """``build``, a ``from_config`` of transformers, which makes the model with its MTP layers."""

    def built(config: PretrainedConfig, **options: Any) -> PreTrainedModel:
        # built as more layers of the decoder, which are as its family has them and share the model's config
        depth, kinds = config.num_hidden_layers, getattr(config, "layer_types", None)
        config.num_hidden_layers = depth + count_of(config)
        if kinds is not None:
            config.layer_types = [*kinds, *["full_attention"] * count_of(config)]
        model = build(config, **options)
        model.config.num_hidden_layers = depth  # the decoders run so many
        if kinds is not None:
            model.config.layer_types = kinds
        decoder: Any = model.get_decoder()
        for layer in decoder.layers[depth:]:
            _complete(layer, model.config, type(decoder.norm))
        return model

    return built


def _complete(layer: nn.Module, config: Any, norm: Any) -> None:
    """Make an MTP layer of a decoder layer, in place."""
    width, eps = config.hidden_size, config.rms_norm_eps
    layer.enorm, layer.hnorm = norm(width, eps=eps), norm(width, eps=eps)
    layer.eh_proj = nn.Linear(2 * width, width, bias=False)
    layer.shared_head = nn.ModuleDict({"norm": norm(width, eps=eps)})
    swap_methods(layer, MtpLayer)


def trunk_and_behind(layers: Iterable[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """The layers that the decoder runs, and the MTP layers behind them."""
    layers = list(layers)
    return [each for each in layers if not isinstance(each, MtpLayer)], [e for e in layers if isinstance(e, MtpLayer)]


def layer_names(model: nn.Module) -> list[str]:
    """The names of the model's MTP layers."""
    return [name for name, module in model.named_modules() if isinstance(module, MtpLayer)]


def own_name(tensor: str, layers: Sequence[str], config: PretrainedConfig) -> str:
    """The name in transformers' style, for a model with the MTP ``layers``, of the hub's ``tensor``."""
    for prefix, rest in FORMATS[config.model_type].names if layers else ():
        if tensor.startswith(prefix):
            return f"{layers[0]}.{rest}{tensor.removeprefix(prefix)}"
    return tensor


def is_copy(tensor: str, layers: Sequence[str]) -> bool:
    """Whether the hub's ``tensor`` is of an MTP layer's copy of the embedding or the head, its scale included."""
    return any(tensor.startswith(f"{layer}.{copy}") for layer in layers for copy in _COPIES)


def as_published(tensors: Mapping[str, Value], model: PreTrainedModel) -> dict[str, Value]:
    """``tensors`` of ``model`` under the hub's names of MTP layers, and their copies, of the model's own weights."""
    layers = layer_names(model)
    if not layers:
        return dict(tensors)
    known, names = FORMATS[model.config.model_type], {id(m): name for name, m in model.named_modules()}
    found = {_published(name, layers[0], known): value for name, value in tensors.items()}
    owners = (model.get_input_embeddings(), model.get_output_embeddings())
    first, *_ = own = [f"{names[id(owner)]}.weight" for owner in owners]
    for layer in layers if known.copies else ():
        # a head that is tied to the embedding is in no file
        found |= {
            f"{layer}.{copy}weight": tensors.get(name, tensors[first]) for copy, name in zip(_COPIES, own, strict=True)
        }
    return found


def _published(name: str, layer: str, known: MtpFormat) -> str:
    for prefix, rest in known.names:
        if name.startswith(f"{layer}.{rest}"):
            return prefix + name.removeprefix(f"{layer}.{rest}")
    return name
