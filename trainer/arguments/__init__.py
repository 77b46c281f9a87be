"""The options of a run: one dataclass, made of each room's options."""
