"""The GPUs of this host: what they do, who uses them, how they are named, and which of them a run gets.

The driver is asked in a process of its own (`sampler`), because a call to it can block for ever; everyone else reads
what that process tells (`monitor`).
"""
