"""Compiled HLO, read as text.

A module's instructions, loops and collectives, and what one execution of it costs a chip. Nothing here knows of a
recipe or a model.
"""
