"""A proof of a recipe: a small model like the run's, sharded as on a TPU, beside the plain one, number by number."""
