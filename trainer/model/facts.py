"""ModelFacts: each fact that a run needs of a model, found once from its config and its modules on meta."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable
from typing import Any, Concatenate, ParamSpec, TypeVar

from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from shardwright.model.adapted_weights import Part
from shardwright.model.classifier import head_of
from shardwright.model.meta_model import is_multimodal, meta_model, names_in_whole, scores_texts, whole_model
from shardwright.models.adapters.lora import Lora, adaptable, attach
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.layers import mtp, rope
from shardwright.models.mixers.work import state_multiply_adds

P = ParamSpec("P")
R = TypeVar("R")
_KEPT = 4  # configs whose facts are kept: a run has one, a search over recipes with models of their own has a few


def once(question: Callable[Concatenate[ModelFacts, P], R]) -> Callable[Concatenate[ModelFacts, P], R]:
    """``question`` with its answers cached in the facts by its arguments."""

    @functools.wraps(question)
    def answer(facts: ModelFacts, *args: P.args, **kwargs: P.kwargs) -> R:
        key = question, args, tuple(kwargs.items())
        if key not in facts.answers:
            facts.answers[key] = question(facts, *args, **kwargs)
        return facts.answers[key]

    return answer


class ModelFacts:
    """A model on meta and its facts. All of it is read only: to change a model, copy it.

    Attributes:
        model: made by :func:`shardwright.model.meta_model.meta_model`, whose errors it raises.
        kind: the name of its class.
        experts: the dotted names of its modules that hold experts.
        parameters: how many numbers its parameters have, without LoRA factors.
        scores_texts: it is one of sequence classification, and no causal language model.

    ``train_mtp``: the model has its MTP layers, which transformers leaves out.
    """

    def __init__(self, config: PretrainedConfig, train_mtp: bool = False) -> None:
        self.config, self.model = config, meta_model(config, train_mtp)
        self.kind, self.experts = type(self.model).__name__, experts_modules(self.model)
        self.parameters = sum(parameter.numel() for parameter in self.model.parameters())
        self.answers: dict[Any, Any] = {}
        self.scores_texts = scores_texts(config)

    @functools.cached_property
    def whole(self) -> PreTrainedModel:
        """The model of a full checkpoint, on meta; for a multimodal config ``model`` is its text part."""
        return whole_model(self.config) if is_multimodal(self.config) and not self.scores_texts else self.model

    @functools.cached_property
    def names_in_whole(self) -> dict[str, str]:
        """The whole's name of each of the model's parameters and saved buffers."""
        return names_in_whole(self.model, self.whole) or {}

    @property
    def part(self) -> Part:
        """The model, as a part of the whole."""
        return Part(self.model, self.whole, self.names_in_whole)

    @property
    def is_part(self) -> bool:
        """Whether the whole has values that are not trained."""
        return len(self.names_in_whole) < len(self.whole.state_dict())

    @functools.cached_property
    def routing(self) -> tuple[int, int] | None:
        """(experts that a token goes to, all experts); None: there are none, or the config does not say."""
        chosen = getattr(self.config.get_text_config(), "num_experts_per_tok", None)
        if chosen is None or not self.experts:
            return None
        return chosen, next(iter(self.model.get_submodule(self.experts[0]).parameters())).shape[0]

    @functools.cached_property
    def positions(self) -> int | None:
        """The number of positions in the model's tables; None: it has no tables, as with RoPE that is not dynamic.

        On XLA a position beyond a table's end would silently get the last entry.
        """
        limit = stated(self.config, "max_position_embeddings")
        if limit is None:
            return None
        if (fixed := rope.most_positions(self.model)) is not None:
            return fixed
        tokens, found = self.model.get_input_embeddings(), []
        for module in self.model.modules():
            if isinstance(module, nn.Embedding) and module is not tokens:
                padding = -1 if module.padding_idx is None else module.padding_idx
                # some families' tables begin at the third row, so have two rows more than positions
                if limit <= module.num_embeddings <= limit + 2:
                    found.append(min(limit, module.num_embeddings - padding - 1))
            # sines, rotations or masks of each position, or the positions themselves
            if any(b.dim() > 1 and limit in b.shape[:2] for b in module.buffers(recurse=False)):
                found.append(limit)
        return min(found, default=None)

    @once
    def adapted(self, lora: Lora | None) -> PreTrainedModel:
        """The model with the factors of ``lora`` and all else frozen; None: the model itself."""
        if lora is None:
            return self.model
        model = copy.deepcopy(self.model)
        attach(model, lora, adaptable(model, self.experts))
        return model

    def training_flops(self, rows: int, length: int, lora: Lora | None = None) -> float | None:
        """FLOPs that a step on ``rows`` × ``length`` tokens needs, as MFU counts them, without recomputation.

        6 for each pair of a weight and a token that meet in a matrix product (4 if the weight is frozen), where a token
        meets only its own experts, and an embedding lookup is no product; 6 × the widths of query and value for each
        pair of tokens that attend, in each layer by its kind; and 6 for each multiply-add of a recurrent layer's state.
        None: the config does not say how many experts a token goes to.
        """
        if self.experts and self.routing is None:
            return None
        text, model = self.config.get_text_config(), self.adapted(lora)
        share = self.routing[0] / self.routing[1] if self.routing else 1.0
        looked_up = {id(p) for p in model.get_input_embeddings().parameters()}
        head = head_of(model)
        looked_up -= {id(p) for p in head.parameters()} if head is not None else set()
        weights = 0.0
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and id(parameter) not in looked_up:
                each = 6 if parameter.requires_grad else 4
                weights += each * parameter.numel() * (share if name.rpartition(".")[0] in self.experts else 1.0)
        further = len(mtp.layer_names(model))  # each uses the head once more
        if further and head is not None:
            weights += 6 * further * sum(p.numel() for p in head.parameters())
        pairs = sum(attended_pairs(text, kind, length) for kind in layer_kinds(text))
        pairs += further * attended_pairs(text, FULL, length)
        recurrent = sum(kind not in ATTENTION for kind in layer_kinds(text))
        state = 6 * recurrent * state_multiply_adds(text) * length
        return rows * (weights * length + 6 * _attention_width(text) * pairs + state)


FULL = "full_attention"
ATTENTION = (FULL, "attention", "sliding_attention", "chunked_attention")  # of transformers' `layer_types`


def layer_kinds(text: PretrainedConfig) -> list[str]:
    """The kind of each layer, as `layer_types` has it; without it all slide or chunk where the config has a window."""
    windows = {"sliding_attention": "sliding_window", "chunked_attention": "attention_chunk_size"}
    alike = next((kind for kind, window in windows.items() if getattr(text, window, None)), FULL)
    return list(getattr(text, "layer_types", None) or [alike] * text.num_hidden_layers)


def attended_pairs(text: PretrainedConfig, kind: str, length: int) -> float:
    """The pairs of a token and one that it sees, in a row of a layer of that ``kind``; 0 where none attends."""
    if kind == "chunked_attention":
        chunk = min(text.attention_chunk_size, length)
        whole, rest = divmod(length, chunk)
        return (whole * chunk * (chunk + 1) + rest * (rest + 1)) / 2
    if kind not in ATTENTION:
        return 0.0
    window = min(text.sliding_window or length, length) if kind == "sliding_attention" else length
    return length * window - window * (window - 1) / 2


def _attention_width(text: PretrainedConfig) -> float:
    """Heads × the sizes of a key and a value; where these differ by layer, as Gemma-4's do, the mean over layers."""
    # semi-private: integrations/heterogeneity/configuration_utils.py, transformers 5.23; earlier configs are all plain
    layers = list(getattr(text, "per_layer_config", None) or [text])

    def width(each: PretrainedConfig) -> int:
        heads: int = each.num_attention_heads
        head = getattr(each, "head_dim", None) or each.hidden_size // heads
        key, value = (getattr(each, name, None) or head for name in ("qk_head_dim", "v_head_dim"))
        return heads * (key + value)

    return sum(map(width, layers)) / len(layers)


_known: dict[Any, ModelFacts] = {}  # the last few configs'


def facts_of(config: PretrainedConfig, train_mtp: bool = False) -> ModelFacts:
    """The facts of the model of ``config``, shared by equal configs within a process; raises as :class:`ModelFacts`."""
    key = train_mtp, type(config), config.name_or_path, json.dumps(config.to_dict(), default=str, sort_keys=True)
    if key not in _known:
        while len(_known) >= _KEPT:
            del _known[next(iter(_known))]
        _known[key] = ModelFacts(copy.deepcopy(config), train_mtp)
    return _known[key]


def stated(config: PretrainedConfig, name: str) -> Any:
    """The text config's value of ``name``; None: it has none, or one for each layer."""
    try:
        return getattr(config.get_text_config(), name, None)
    except RuntimeError:  # transformers/integrations/heterogeneity/configuration_utils.py, transformers 5.23
        return None
