"""Adapters: small trained tensors beside a model's frozen weights (LoRA). Data decides which weights have one."""
