"""Sparse prefill: which blocks of a prompt its later tokens read (CritiPrefill)."""
