"""A run's log, page, callbacks, trackers, state and messages."""
