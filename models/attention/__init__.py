"""Causal attention, in memory linear in the sequence, registered in transformers' attention interface."""
