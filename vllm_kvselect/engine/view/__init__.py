"""The one-head view: a batch as sequences over pages of single heads."""
