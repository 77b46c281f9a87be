"""Samples: records as tokens and labels, fitted into rows."""
