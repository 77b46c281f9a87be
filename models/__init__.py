"""Kernels and model surgery that plug into transformers' own registries. Imports nothing of the other rooms."""
