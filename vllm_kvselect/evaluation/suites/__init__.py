"""Suites: each makes examples, by one function `(config, tokenizer) -> examples`.

The same arguments give the same examples: `seed` decides which, `max_tokens` is of an answer.
"""
