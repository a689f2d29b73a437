"""Start and own a run: preflight, lifecycle, and its two drivers: `launcher` (spawned ranks) and `external`."""
