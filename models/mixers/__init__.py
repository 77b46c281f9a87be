"""Layers that mix tokens by a recurrence: linear attention, state spaces, short convolutions.

Each is a JAX function that runs over a row in segments; :func:`bind.bind` puts them in the place of transformers' own.
"""
