"""The model that runs: a copy of transformers' own, its kernels chosen and its layers stacked."""

import copy
from typing import Literal

from transformers import PreTrainedModel

from shardwright.model.facts import ModelFacts, once
from shardwright.models.adapters.lora import Lora
from shardwright.models.attention import attention_interface as attention
from shardwright.models.experts import experts_interface as experts
from shardwright.models.layers.decoder_layers import stack_layers, wrap_layers


@once
def assembled(
    facts: ModelFacts,
    lora: Lora | None,
    attends: str,
    kernel: str | None,
    layers: Literal["stacked", "wrapped", "plain"],
) -> tuple[PreTrainedModel, str]:
    """A copy of the adapted model that runs with these kernels; and why its layers can't be stacked, else "".

    ``attends`` and ``kernel`` name the attention and the experts (None: there are none) in transformers' registries.
    """
    model = copy.deepcopy(facts.adapted(lora))
    attention.choose(model, attends)
    if kernel is not None:
        experts.choose(model, kernel)
    if layers == "wrapped":
        wrap_layers(model)
    try:
        if layers == "stacked":
            stack_layers(model)
    except ValueError as error:  # the model is as it was
        return model, str(error)
    return model, ""
