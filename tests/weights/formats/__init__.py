"""Published formats of weights, each against a referee."""
