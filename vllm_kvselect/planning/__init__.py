"""What becomes of a request, from lengths and settings alone: its plan."""
