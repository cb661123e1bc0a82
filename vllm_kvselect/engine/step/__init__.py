"""A step of the model in a worker: rows, split, packing, page tables, layers."""
