"""Mixtures of experts, as functions in transformers' experts interface.

Each has static shapes and never waits for the device. `capacity` drops the tokens beyond an expert's capacity;
`dropless` is exact for any routing; `dense` is the plain reference.
"""
