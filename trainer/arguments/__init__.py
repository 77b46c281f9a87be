"""What a run is told: one dataclass of options, gathered from those of each room."""
