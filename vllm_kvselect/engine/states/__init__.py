"""What cuts inside prompts leave, in the pool and in a folder; `worker_*.py` run in workers."""
