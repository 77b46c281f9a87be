"""A model's weights on their way in and out, one parameter at a time.

They come from a hub checkpoint, a seeded init, a run's checkpoint or a state dict, and go onto the mesh or to files in
the hub's format. The host never holds the whole model.
"""
