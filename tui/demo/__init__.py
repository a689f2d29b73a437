"""A replayed server for `gputrain-tui --demo`."""
