"""Textual widgets that the screens are composed of."""
