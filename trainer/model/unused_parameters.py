"""Parameters that take no part in the loss, found by running the model on meta: no class or config tells them.

Such are biases that only choose experts, indexers that run without gradients, and the encoder's side of a decoder. Like
torch's optimizers, the step leaves a parameter without a gradient as it is, unlike one whose gradient is zero.
"""

import contextlib
import copy
import functools
import operator
import re
from collections import Counter
from typing import Any

import torch
from transformers import PreTrainedModel

from shardwright.errors import UserError, in_short
from shardwright.model.facts import ModelFacts, once
from shardwright.model.meta_model import scores_texts
from shardwright.models.adapters.lora import Lora
from shardwright.models.attention.attention_interface import masks_without_reads
from shardwright.models.experts import experts_interface as experts
from shardwright.models.experts.expert_families import experts_modules
from shardwright.models.layers import mtp
from shardwright.models.layers.mtp_loss import predicting

_ROWS, _TOKENS = 2, 8
_LISTED = 6  # most patterns in a notice


@once
def unused_parameters(facts: ModelFacts, lora: Lora | None, router_loss: bool) -> tuple[frozenset[str], str | None]:
    """The names of the adapted model's parameters that no gradient reaches; and why they can't be found, or None.

    They can't if the model reads values while it runs. Then only parameters that the family itself freezes are named.
    ``router_loss``: the model's load-balancing loss is part of the loss. UserError: no parameter takes part in it.
    """
    model = facts.adapted(lora)
    named = list(model.named_parameters())
    why = None
    try:
        reached = _leaves(_loss(model, router_loss))
    except Exception as error:  # a family's code may raise anything on tensors without values
        reached, why = set(range(len(named))), in_short(error)
    unused = frozenset(name for i, (name, p) in enumerate(named) if i not in reached or not p.requires_grad)
    if len(unused) == len(named):
        raise UserError(
            asked=f"to train {type(model).__name__}",
            found=f"none of its {len(named)} parameters takes part in the loss",
            why="there is nothing to learn",
            instead="a model whose parameters require gradients, and whose logits depend on them",
        )
    return unused, why


def notice(unused: frozenset[str], why_unknown: str | None) -> str | None:
    """The run's line about unused parameters, each pattern of names once; None: there are none."""
    if why_unknown is not None:
        return f"taken to be none: which parameters take part in the loss can't be tried without values ({why_unknown})"
    if not unused:
        return None
    patterns = Counter(re.sub(r"(?<=\.)\d+(?=\.)", "*", name) for name in sorted(unused))
    listed = [f"{pattern} ({count})" if count > 1 else pattern for pattern, count in patterns.items()]
    more = f" and {len(listed) - _LISTED} more" if len(listed) > _LISTED else ""
    return f"no part in the loss, and left as they are: {', '.join(listed[:_LISTED])}{more}"


def _loss(model: PreTrainedModel, router_loss: bool) -> torch.Tensor:
    """The loss of a copy on meta, whose parameters bear their ``number``."""
    # in evaluation mode: dropout never removes a parameter for good
    model = copy.deepcopy(model).to("meta").eval()  # type: ignore[arg-type]
    for number, parameter in enumerate(model.parameters()):
        parameter.number = number  # type: ignore[attr-defined]
    model.set_attn_implementation("eager")  # the one that every family has, with every kind of mask
    if experts_modules(model):
        experts.choose(model, "dense")
    ids = torch.zeros((_ROWS, _TOKENS), dtype=torch.int64, device="meta")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if hasattr(model.config, "output_router_logits"):
        inputs |= {"output_router_logits": router_loss, "attention_mask": torch.ones_like(ids)}
    batch, further = {"input_ids": ids, "labels": ids}, list[torch.Tensor]()
    with masks_without_reads(), torch.enable_grad(), contextlib.ExitStack() as stack:
        if mtp.layer_names(model):
            head: Any = model.get_output_embeddings()
            further = stack.enter_context(predicting(model, batch, torch.ones(()), None, lambda x, _: head(x).sum()))
        if scores_texts(model.config):
            del inputs["labels"]
        found = model(**inputs)
        loss: torch.Tensor = found.logits.sum() if scores_texts(model.config) else found.loss
        return functools.reduce(operator.add, further, loss)


def _leaves(loss: torch.Tensor) -> set[int]:
    """The numbers of the parameters that a backward from ``loss`` would reach, and -1 for whatever else it does."""
    seen, found, left = set(), set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(getattr(getattr(node, "variable", None), "number", -1))
            left += [following for following, _ in node.next_functions]
    return found
