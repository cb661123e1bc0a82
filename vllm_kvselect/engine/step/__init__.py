"""A step of the model in a worker: how a batch is split, layers, and what is reported."""
