"""Compiled HLO, read as text: instructions, loops, collectives, and the cost of one execution for a chip."""
