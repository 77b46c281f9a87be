"""What a person sees of a run: progress bars, log lines, tables, pages, and quantities in readable units.

Whoever calls it hands it values and strings; it knows nothing of recipes, models or devices.
"""
