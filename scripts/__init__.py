"""The commands: a command line and one call each."""
