"""Models that score a text: transformers' sequence classification with one label, the form of a reward model.

The decoder is the causal model's, and in place of its head lies ``score``, a linear layer of one output.
"""

import copy
import re
from pathlib import Path
from typing import Any

import transformers
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

# semi-private: transformers/modeling_layers.py, models/auto/modeling_auto.py and configuration_auto.py, 5.23
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import model_type_to_module_name

from shardwright.errors import UserError
from shardwright.model.meta_model import is_multimodal, scores_texts

_GENERIC = GenericForSequenceClassification


def reward_config(config: PretrainedConfig) -> PretrainedConfig:
    """The config of the reward model on the decoder of ``config``, which may be a causal or a reward model's.

    Raises UserError if transformers has no such class for the family, or it can't be trained here.
    """
    own: Any = transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(config), None)
    found, instead = None, ""
    if is_multimodal(config):
        found = "a multimodal model, whose class for sequence classification is of text and images"
    elif own is None:
        found = f"a family without a class for sequence classification in transformers {transformers.__version__}"
    elif not issubclass(own, _GENERIC):
        found = f"{own.__name__}, which computes its loss within its forward, by code of its own"
    elif scores_texts(config) and config.num_labels != 1:
        found = f"{own.__name__} with num_labels={config.num_labels}"
        instead = "the causal model that it was made from, or a classifier with one label"
    if found is not None:
        raise UserError(
            asked=f"a reward model of type {config.model_type!r}",
            found=found,
            why="it is trained and written as transformers' sequence classification with one label, score.weight",
            instead=instead or f"a model of a family that has such a class: {', '.join(_families())}",
        )
    made = copy.deepcopy(config)
    made.architectures, made.num_labels = [own.__name__ if own else ""], 1
    return made


def _families() -> list[str]:
    """The types of models of text that a reward model can be made of, read off transformers' source: none is loaded."""
    known, folder = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, Path(transformers.__file__).parent / "models"
    seeing, found = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES, []
    for name, own in modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.items():
        module = model_type_to_module_name(name)
        file = folder / module / f"modeling_{module}.py"
        text = file.read_text(encoding="utf-8") if name in known and name not in seeing and file.is_file() else ""
        if re.search(rf"^class {own}\(.*{_GENERIC.__name__}", text, re.MULTILINE):
            found.append(name)
    return sorted(found)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The layer behind the decoder: the head of a causal model, or the score of a reward model."""
    return model.score if isinstance(model, _GENERIC) else model.get_output_embeddings()


def head_parameters(model: PreTrainedModel) -> list[str]:
    """The names of a reward model's parameters behind its decoder; none of another model."""
    inside = f"{model.base_model_prefix}."
    return [n for n, _ in model.named_parameters() if isinstance(model, _GENERIC) and not n.startswith(inside)]


def padding_token(tokenizer: PreTrainedTokenizerBase) -> int:
    """The token that pads texts, at which no reward is read; as in trl, the end-of-text token where there is none."""
    found = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return -1 if found is None else int(found)
