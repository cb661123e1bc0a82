"""What runs beside vLLM's scheduler: which blocks a request keeps, and who may share them."""
