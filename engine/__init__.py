"""Trains. Knows nothing of screens."""
