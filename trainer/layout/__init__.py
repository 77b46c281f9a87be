"""Layout: from a recipe, the table that a person writes, to a plan of every parameter.

A recipe is loaded, resolved against a model's shapes and a mesh, and checked until nothing in it can fail later.
All of it is pure: it needs no device, reads no weights and allocates nothing.
"""
