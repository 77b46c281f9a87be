"""Packings: ways to hold a frozen weight in fewer bits, one file each, listed in `registry.py`."""
