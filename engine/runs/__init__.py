"""Run folders: journal, history, ownership and control requests."""
