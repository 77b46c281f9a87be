"""Causal attention, under one name in transformers' attention interface.

It is jax's splash attention, or plain tensor operations where that can't do what is asked. Both need memory linear in
the sequence.
"""
