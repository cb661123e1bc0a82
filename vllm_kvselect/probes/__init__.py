"""Calibrated probes in files: what they are of, and where they are found."""
