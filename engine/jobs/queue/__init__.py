"""The queue of runs that wait for GPUs, without a daemon: each run waits in its own supervisor.

`state` stores the place of a run in its folder, `dependencies` follows the runs that it waits for, `place` holds its
place while it waits, `listing` lists all runs that wait on this host, and `edit` changes the place of one of them.
"""
