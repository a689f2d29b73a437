"""The commands of `gputrain`, one module for each group."""
