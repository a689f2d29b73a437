"""Run folders: journal, history, ownership, control requests and the bottleneck diagnosis."""
