"""The code of a run: its commit, the changes since that commit, and a copy of it.

`engine.jobs.launch` records it when a run is made, and compares it when the run starts.
"""
