"""Kernels and model surgery that plug into transformers' own registries; no modeling file is forked.

They give every family static shapes, one scanned layer instead of many, and kernels that a TPU runs well.
"""
