"""The training step: forward, backward, gradient reduction, clipping and update as one XLA computation.

It is built once from a recipe and a plan, compiled once, and run for every batch; a later compile stops the run.
"""
