"""Adapters: small trained tensors beside a model's frozen weights (LoRA). Data decides which weights have one.

`lora` puts them into a model, in place; the experts' kernels find theirs by name.
"""
