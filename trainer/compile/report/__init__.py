"""The compile report: memory, time and collectives of a step, as text, page and JSON."""
