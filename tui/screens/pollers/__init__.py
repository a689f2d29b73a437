"""Threads that read GPUs, runs and files for the screens, which show the latest result and never wait."""
