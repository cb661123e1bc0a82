"""A folder of contexts beside the cache: what a worker's files are of, and how they come and go."""
