"""A model's weights, a parameter at a time: from any source onto the mesh, or into files of the hub's format."""
