"""A run's progress bars, log lines, tables and pages, made of values and strings alone."""
