"""Start and own a run: preflight, lifecycle, and two drivers, `launcher` (gputrain starts the ranks) and `external`
(torchrun or srun starts them)."""
