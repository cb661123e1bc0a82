"""The papers' analysis: what eviction does to the attention of a transformers model."""
