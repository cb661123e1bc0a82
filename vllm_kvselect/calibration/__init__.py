"""Calibration: a linear probe that imitates a costly query-agnostic score, fitted per model."""
