"""Optimizers: update rules, their state and its layout."""
