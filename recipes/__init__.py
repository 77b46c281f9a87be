"""The recipes that ship with Shardwright, one file each: data, not code."""
