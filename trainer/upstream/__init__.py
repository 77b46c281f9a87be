"""transformers' and trl's trainers: which of their names are here, and what takes the place of the others."""
