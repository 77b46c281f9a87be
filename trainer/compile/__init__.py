"""Compiles a run's graphs with the TPU's own compiler on a machine without a TPU, and reports memory, time, traffic."""
