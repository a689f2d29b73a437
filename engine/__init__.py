"""Training engine; imports nothing from `tui`."""
