"""Moves a model's weights, one parameter at a time: from any source onto the mesh, or into files of the hub's format.

The host never holds the whole model.
"""
