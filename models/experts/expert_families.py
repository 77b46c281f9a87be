"""Families whose experts need an adaptation, one line each, by the name of transformers' class."""

from collections.abc import Callable
from functools import partial

from torch import nn
from transformers.modeling_outputs import MoeCausalLMOutputWithPast

from shardwright.models.experts import expert_loops, input_scaling
from shardwright.models.swapped_methods import swap_methods

# class of a block with experts → the function that puts these under the experts interface, or makes shapes static
EXPERTS: dict[str, Callable[[nn.Module], None]] = {
    "Llama4TextMoe": input_scaling.route,
    "DbrxExperts": partial(swap_methods, mixin=expert_loops.Glu),
    "JetMoeParallelExperts": partial(swap_methods, mixin=expert_loops.RowsProducts),
    "JetMoeTopKGating": partial(swap_methods, mixin=expert_loops.JetMoeRows),
    "LongcatFlashExperts": partial(swap_methods, mixin=expert_loops.SomeIdentity),
}

# classes of experts that transformers and serving engines load in MXFP4, all of a layer's in one tensor
MXFP4 = {"GptOssExperts"}  # integrations/mxfp4.py, transformers 5.23


def adapt(model: nn.Module) -> None:
    """Make XLA able to run all experts of ``model``. Parameters keep names and shapes, results their values."""
    for module in list(model.modules()):
        if entry := EXPERTS.get(type(module).__name__):
            entry(module)
    # semi-private: a whole model asks for it what its text part returns, and ends in an AttributeError
    # (transformers/models/llama4/modeling_llama4.py, transformers 5.24.0)
    if not hasattr(MoeCausalLMOutputWithPast, "image_outputs"):
        MoeCausalLMOutputWithPast.image_outputs = None  # type: ignore[attr-defined]


def experts_modules(model: nn.Module) -> list[str]:
    """The dotted names of the modules that hold experts."""
    # semi-private: `use_experts_implementation` marks experts modules so (transformers/integrations/moe.py, 5.23)
    return [name for name, module in model.named_modules() if hasattr(module, "_is_expert_parallel")]
