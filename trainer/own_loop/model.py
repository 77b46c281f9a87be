"""LoopModel: the model of a loop of one's own, called as transformers' is."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from shardwright.own_loop.placed_loop import PlacedLoop
from shardwright.upstream.absent_names import NotHere


class LoopModel:
    """Calls the placed model; ``parameters()`` are those of the model on the host, which it was prepared of."""

    def __init__(self, loop: PlacedLoop) -> None:
        self.loop = loop
        self.training = loop.model.training

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        **others: Any,
    ) -> CausalLMOutput:
        """The loss, if there are ``labels``, and logits of tokens [rows, S]; padding is neither read nor scored.

        Raises UserError for other inputs, and what the first batch shows that can't be.
        """
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "labels": labels, **others}
        return self.loop.forward(inputs, training=self.training)

    def train(self, mode: bool = True) -> "LoopModel":
        self.training = mode
        return self

    def eval(self) -> "LoopModel":
        return self.train(False)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.loop.model.parameters(recurse)

    def named_parameters(self, *how: Any, **more: Any) -> Iterator[tuple[str, nn.Parameter]]:
        return self.loop.model.named_parameters(*how, **more)

    @property
    def config(self) -> PretrainedConfig:
        return self.loop.model.config

    @property
    def module(self) -> PreTrainedModel:
        """The model on the host, as `unwrap_model` returns it."""
        return self.loop.trained()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(type(self.loop.model), name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        raise NotHere(
            asked=f"model.{name} of a model that is prepared",
            found="a model whose parameters lie on the mesh, its layers in stacks",
            why="it is called, set to train() or eval(), and no more",
            instead="accelerator.unwrap_model(model), transformers' own with the trained weights, on the host; layers "
            "that are computed again (gradient checkpointing) are the recipe's Compute(remat=…)",
        )
