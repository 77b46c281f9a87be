"""The search for a setting of a job that fits and is fast."""
