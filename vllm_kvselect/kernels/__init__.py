"""Fast twins of the references, one module a device: same names, same signatures."""
