"""Models that score a text: transformers' sequence classification with one label, the form of a reward model.

The decoder is the causal model's, and in place of its head lies ``score``, a linear layer of one output.
"""

import copy

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# semi-private: transformers/modeling_layers.py and transformers/models/auto/modeling_auto.py, transformers 5.23
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto import modeling_auto

from shardwright.errors import UserError
from shardwright.model.meta_model import is_multimodal, scores_texts

_GENERIC = GenericForSequenceClassification


def reward_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the reward model on the decoder of ``config``, which may be a causal or a reward model's.

    Raises UserError if transformers has no such class for the family, or it can't be trained here.
    """
    kind, name = config.model_type, modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    known, found = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, None
    families = [family for family in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES if family in known]
    instead = "a model of another family, such as llama, qwen3, gemma2, mixtral or qwen3_moe"
    if is_multimodal(config):
        found = "a multimodal model, whose class for sequence classification is of text and images"
    elif type(config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        found = f"a family without a class for sequence classification in transformers {transformers.__version__}"
        instead = f"a model of a family that has one: {', '.join(sorted(families))}"
    elif not issubclass(own := transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING[type(config)], _GENERIC):
        found = f"{own.__name__}, which computes its loss within its forward, by code of its own"
    elif scores_texts(config) and config.num_labels != 1:
        found = f"{name} with num_labels={config.num_labels}"
        instead = "the causal model that it was made from, or a classifier with one label"
    if found is not None:
        raise UserError(
            asked=f"a reward model of type {kind!r}",
            found=found,
            why="it is trained and written as transformers' sequence classification with one label, score.weight",
            instead=instead,
        )
    made = copy.deepcopy(config)
    made.architectures, made.num_labels = [name], 1
    return made


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer behind the decoder: the head of a causal model, or the score of a reward model."""
    return model.score if isinstance(model, _GENERIC) else model.get_output_embeddings()


def head_parameters(model: PreTrainedModel) -> list[str]:
    """The names of a reward model's parameters behind its decoder; none of another model."""
    inside = f"{model.base_model_prefix}."
    return [n for n, _ in model.named_parameters() if isinstance(model, _GENERIC) and not n.startswith(inside)]


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that pads texts, and that a reward is never read at; as in trl the end-of-text token without another."""
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return -1 if found is None else int(found)
