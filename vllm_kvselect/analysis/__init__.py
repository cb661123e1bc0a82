"""Evaluation off the engine, on transformers: the papers' analysis of what eviction does."""
