"""Layout: from a recipe, the table that a person writes, to a checked plan of every parameter.

All of it is pure: it needs no device, reads no weights and allocates nothing.
"""
