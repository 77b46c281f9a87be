"""Adapters: small trained tensors beside a model's frozen weights (LoRA). Which weights have one is data.

`lora` puts them into a model, in place; the experts' kernels find theirs by name.
"""
