"""What runs in the front end: options, checks, requests, metrics."""
