"""Causal attention, registered in transformers' attention interface.

It runs jax's splash attention, or plain tensor operations for features that splash lacks. Both need memory linear in
the sequence.
"""
