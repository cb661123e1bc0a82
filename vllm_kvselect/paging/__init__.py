"""From entries to pages: where they go, and how an attention kernel finds them."""
