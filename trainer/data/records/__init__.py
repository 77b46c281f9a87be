"""Records: read from files, the hub or a stream, and what shape they have."""
