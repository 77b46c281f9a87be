"""A run's checkpoints: all that it needs to go on as if it had never stopped.

They are written while training goes on, and are whole or not there at all. Their shards are read back onto any mesh.
"""
