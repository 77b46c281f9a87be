"""Logits of vLLM's own models beside transformers', of exports that ``python -m tests.serving.models FOLDER`` wrote.

Run as `record_vllm.py` is: ``python tests/serving/logits_vllm.py FOLDER llama mixtral``.

vLLM's wheel has no kernels for a CPU. Its models, loader, routing, norms and rotations run here as they are, the last
two in vLLM's native forms; attention and the experts' product, which are kernels alone, are plain ones.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
import torch.nn.functional as F
from record_vllm import build
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from vllm.config import set_current_vllm_config
from vllm.forward_context import set_forward_context
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.utils import process_weights_after_loading

TOKENS = torch.arange(24) * 7 % 256


def attention(self: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Causal attention within one row of tokens, perhaps in a window: [tokens, heads · width] each."""
    length, groups = len(query), self.num_heads // self.num_kv_heads
    q = query.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
    k, v = (t.unflatten(1, (self.num_kv_heads, -1)).transpose(0, 1).repeat_interleave(groups, 0) for t in (key, value))
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    if self.sliding_window:
        seen &= torch.ones(length, length, dtype=torch.bool).triu(1 - self.sliding_window)
    scores = (q @ k.transpose(1, 2) * self.impl.scale).masked_fill(~seen, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)


def experts(
    _: Any, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *__: Any, **___: Any
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for expert, (w13, w2) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        gate, up = (x @ w13.T).chunk(2, -1)
        out += (topk_weights * (topk_ids == expert)).sum(-1, keepdim=True) * ((F.silu(gate) * up) @ w2.T)
    return out


Attention.forward = attention
CustomOp.dispatch_forward = lambda self, *_, **__: self.forward_native
UnquantizedFusedMoEMethod.apply = experts
UnquantizedFusedMoEMethod.is_monolithic = False
UnquantizedFusedMoEMethod.process_weights_after_loading = lambda self, layer: None


@torch.no_grad()
def difference(folder: Path) -> float:
    """The largest difference of a logit, over the largest logit."""
    config, model = build(folder, enable_lora=False)
    model.load_weights(item for file in folder.glob("*.safetensors") for item in load_file(file).items())
    process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    with set_current_vllm_config(config), set_forward_context(None, config, num_tokens=len(TOKENS)):
        ours = model.compute_logits(model(TOKENS, torch.arange(len(TOKENS))))
    how = {"dtype": torch.float32, "attn_implementation": "eager", "experts_implementation": "eager"}
    theirs = AutoModelForCausalLM.from_pretrained(folder, **how)(TOKENS[None]).logits[0]
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


for family in sys.argv[2:]:
    print(f"{family}: {difference(Path(sys.argv[1]) / family / 'model'):.1e}", flush=True)
