"""Mixtures of experts, as functions in transformers' experts interface, with static shapes.

`capacity` drops the tokens beyond an expert's capacity; `dropless` is exact for any routing; `dense` is the reference.
"""
