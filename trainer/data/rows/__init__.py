"""Rows of tokens: packed, stored or streamed, mixed, selected, and batched."""
