"""Compressed contexts in a folder: one file a context and rank, complete or absent."""
