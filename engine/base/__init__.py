"""Files, processes, host resources, errors and text, used by every other package."""
