"""The commands of `gputrain`."""
