"""Scorers, one paper a file: window queries and keys in, `[num_kv_heads, num_scored]` out."""
