"""Formats in which weights are published in fewer bits: each says how its tensors hold one weight.

A format is one file here, and one entry in :data:`shardwright.weights.formats.plain_weights.FORMATS`.
"""
