"""What layers are bound to at start-up: output projections, rotary embeddings, probes."""
