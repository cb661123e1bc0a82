"""Peers: others' engines answer our examples, each in an environment of its own."""
