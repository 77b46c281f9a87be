"""One file a recipe: data, not code."""
