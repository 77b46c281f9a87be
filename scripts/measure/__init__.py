"""Scripts that print the figures in docs/."""
