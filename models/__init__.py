"""Kernels and model surgery that plug into transformers' own registries.

They give every family static shapes, one scanned layer instead of many, and kernels that a TPU runs well; no modeling
file is forked. Nothing here imports Shardwright's other packages.
"""
