"""Starts and owns a run: preflight, supervisor, rank processes, external launchers."""
