"""The training step, one XLA computation, and what is made beside it from the same placed model."""
