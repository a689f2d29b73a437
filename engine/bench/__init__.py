"""Measures the speed of a run on 1, 2, ... GPUs, and without its input pipeline."""
