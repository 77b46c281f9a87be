"""A run as it goes: its log, page, callbacks, trackers, state and messages."""
