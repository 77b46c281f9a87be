"""The decoder layers of a model: stacked, scanned, rematerialised."""
