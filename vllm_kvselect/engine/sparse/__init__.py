"""Names and segments of sparse prefills; `worker_*.py` run in workers."""
