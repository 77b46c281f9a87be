"""Objectives: what a step minimises."""
