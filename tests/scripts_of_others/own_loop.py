"""A short loop of one's own, whose weights go to the folder that is its argument."""

import sys

import torch
from accelerate.utils import set_seed
from shardwright import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(recipe="llama_tp", gradient_accumulation_steps=2)
set_seed(3)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1, vocab_size=64))
data = [{"input_ids": tokens, "labels": tokens} for tokens in torch.randint(0, 64, (36, 16))]
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=8, shuffle=True))
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.print(f"loss {loss.item():.6f}")
with accelerator.main_process_first():
    print("host", accelerator.process_index, "of", accelerator.num_processes)
accelerator.save_model(model, sys.argv[1])
