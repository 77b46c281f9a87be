"""XLA: the devices, and placing every tensor on them and checking it."""
