"""Replacements of families' loops over the chosen experts: the same numbers in static shapes.

Every expert sees all tokens here, at E/k times the FLOPs that the routing needs. No family of today's size needs these;
one that does goes under the experts interface (:mod:`shardwright.models.experts.input_scaling`).

Shape suffixes: T tokens, k experts a token, R = T·k rows, H hidden width, F experts' width, E experts.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as f

from shardwright.models.experts.routing import weights_of_all


class Glu(nn.Module):
    """The forward of `DbrxExperts` (transformers 5.23): three projections, each of all experts in one matrix."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        shape = (self.num_experts, self.ffn_hidden_size, self.hidden_size)
        gate_EFH, up_EFH, down_EFH = (w.view(shape) for w in (self.mlp.w1, self.mlp.v1, self.mlp.w2))
        x_TH = hidden_states.reshape(-1, self.hidden_size)
        gated_ETF = self.mlp.activation_fn(x_TH @ gate_EFH.mT) * (x_TH @ up_EFH.mT)
        weight_TE = weights_of_all(top_k_index, top_k_weights, self.num_experts)
        return torch.einsum("eth,te->th", gated_ETF @ down_EFH, weight_TE).view_as(hidden_states)


class SomeIdentity(nn.Module):
    """The forward of `LongcatFlashExperts` (transformers 5.23): the experts behind the routed ones return the token."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Any:
        x_TH, routed = hidden_states, self.num_routed_experts
        weight_TE = weights_of_all(top_k_index, top_k_weights, self.total_experts).to(x_TH.dtype)
        out_TH = x_TH * weight_TE[:, routed:].sum(-1, keepdim=True)
        if self.gate_up_proj is None:
            return out_TH
        gate_ETF, up_ETF = (x_TH @ self.gate_up_proj[:routed].mT).chunk(2, dim=-1)
        y_ETH = (self.act_fn(gate_ETF) * up_ETF) @ self.down_proj.mT
        return out_TH + torch.einsum("eth,te->th", y_ETH, weight_TE[:, :routed])


class JetMoeRows(nn.Module):
    """The forward of `JetMoeTopKGating` (transformers 5.23) with rows in the tokens' order, k for each token."""

    def forward(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
        logits_TE = self.layer(hidden_states).float()
        value_Tk, index_Tk = logits_TE.topk(self.top_k, dim=1)
        weight_Tk = torch.softmax(value_Tk, dim=1).type_as(hidden_states)
        row_R = torch.arange(index_Tk.numel(), device=hidden_states.device)
        # each row's place, token, weight and expert (there: each expert's number of rows), and the logits
        return row_R, row_R // self.top_k, weight_Tk.flatten(), index_Tk.flatten(), logits_TE


class RowsProducts(nn.Module):
    """The forward of `JetMoeParallelExperts` (transformers 5.23): each row times the matrix of its expert."""

    def forward(self: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
        out = inputs.new_zeros(())
        for expert, weight in enumerate(self.weight):
            out = out + f.linear(inputs * (expert_size == expert).unsqueeze(1).to(inputs.dtype), weight)
        return out
