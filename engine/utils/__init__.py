"""Files, processes and text: what has no home in another package."""
