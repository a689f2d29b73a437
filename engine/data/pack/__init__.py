"""Pack an image folder into WebDataset tar shards. `gputrain data pack` calls it."""
