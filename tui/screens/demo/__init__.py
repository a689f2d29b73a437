"""A simulated server for `gputrain-tui --demo`."""
