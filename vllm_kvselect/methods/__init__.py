"""Every method by name (`registry`), and the choice of entries (`choice`)."""
