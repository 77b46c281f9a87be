"""The model that runs: a copy of transformers' own, its kernels chosen and its layers stacked."""

import copy
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from shardwright.errors import UserError
from shardwright.layout.recipe import matches
from shardwright.layout.stacking import layer_names
from shardwright.model.facts import ModelFacts, once
from shardwright.models.adapters.lora import Lora
from shardwright.models.attention import attention_interface as attention
from shardwright.models.experts import experts_interface as experts
from shardwright.models.layers.decoder_layers import DecoderLayers, stack_layers, wrap_layers


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


def modules_of(model: nn.Module, pattern: str) -> list[nn.Module]:
    """The modules of an assembled model that the ``pattern`` of a recipe's activations names.

    A stack's module has the names that it has in each of its layers. UserError: the pattern has only some of them.
    """
    lists = [module for module in model.modules() if isinstance(module, DecoderLayers)]
    counts = {part.name: run.count for each in lists for run in each.runs for part in run.parts if run.count > 1}
    found = []
    for name, module in model.named_modules():
        stack = next((each for each in counts if f"{name}.".startswith(f"{each}.")), None)
        names = [name] if stack is None else [n[:-1] for n in layer_names(f"{name}.", counts[stack])]
        hits = [each for each in names if matches(pattern, each)]
        if hits and len(hits) < len(names):
            raise UserError(
                asked=f"activations line {pattern!r}",
                found=f"it names {hits[0]}, and {names[-1] if hits[0] != names[-1] else names[0]} not",
                why=f"these are two of {len(names)} scanned layers, which are traced once",
                instead="a line for all of them; or Compute(scan=False), with which layers run one by one",
            )
        if hits:
            found.append(module)
    return found
