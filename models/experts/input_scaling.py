"""Blocks that scale a token by its router's score before an expert, put under transformers' experts interface.

Their own forward gives every expert all tokens, scaled by zero where a token goes elsewhere: E times the work. Here an
expert gets only its own tokens, by any of this package's kernels, and the numbers are the same.

Shape suffixes: T tokens, H hidden width, k experts a token, E experts.
"""

from typing import Any

import torch
from torch import Tensor, nn

# semi-private: transformers/integrations/moe.py, transformers 5.23
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from shardwright.models.swapped_methods import swap_methods


def route(block: nn.Module) -> None:
    """Make ``block``, of the structure of Llama-4's `Llama4TextMoe`, route tokens to its experts, in place."""
    swap_methods(block, ScaledBlock)
    swap_methods(block.get_submodule("experts"), ScaledExperts)


class ScaledExperts(nn.Module):
    """Experts with gate and up projections in one, [E, H, 2I], with the attributes of the experts interface."""

    # the attributes that `use_experts_implementation` sets (transformers/integrations/moe.py, transformers 5.23)
    has_gate, has_bias, has_post_expert_norm = True, False, False
    is_transposed, is_concatenated = True, True
    _is_expert_parallel = False
    _apply_gate = _default_apply_gate
    implementation = "dense"  # a name that `shardwright.models.experts.experts_interface` registers

    def forward(self, x_TH: Tensor, index_Tk: Tensor, weight_Tk: Tensor) -> Tensor:
        run: Any = ALL_EXPERTS_FUNCTIONS[self.implementation]
        return run(self, x_TH, index_Tk, weight_Tk)


class ScaledBlock(nn.Module):
    """The block's forward: a shared expert, and each token's k experts on the token times the sigmoid of its score."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        x_TH = hidden_states.reshape(-1, self.hidden_dim)
        logits_TE = nn.functional.linear(x_TH, self.router.weight)
        value_Tk, index_Tk = torch.topk(logits_TE, self.top_k, dim=1)
        score_Tk = torch.sigmoid(value_Tk.float()).to(x_TH.dtype)
        out_TH = self.shared_expert(x_TH)
        one_T1 = torch.ones_like(score_Tk[:, :1])
        for score_T1, index_T1 in zip(score_Tk.split(1, dim=1), index_Tk.split(1, dim=1), strict=True):
            out_TH = out_TH + self.experts(x_TH * score_T1, index_T1, one_T1)
        return out_TH, logits_TE
