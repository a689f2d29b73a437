"""Packed sets: all images of a folder in one file, with an index and checksums. `gputrain data pack` writes them."""
