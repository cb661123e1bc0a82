"""Calibration: a probe of what a model needs to repeat a text, made once per model."""
