"""Causal attention, under one name in transformers' attention interface.

On a TPU it is jax's Pallas kernel, elsewhere plain tensor operations. Both need memory linear in the sequence.
"""
