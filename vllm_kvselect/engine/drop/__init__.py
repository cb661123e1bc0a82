"""What a worker remembers of its requests, and how their entries are dropped."""
