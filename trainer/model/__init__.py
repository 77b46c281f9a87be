"""transformers' own model on meta, the facts of it, and adapters beside it."""
