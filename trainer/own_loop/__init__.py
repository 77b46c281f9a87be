"""A training loop of one's own on the mesh: its model, optimizer and loaders."""
