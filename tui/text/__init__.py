"""Readings, runs and results as text and tables."""
