"""From scores to entries: pages per head, and which entries fill them."""
