"""Batch systems that run jobs of gputrain on a cluster, such as Slurm, and what they say of their jobs."""
