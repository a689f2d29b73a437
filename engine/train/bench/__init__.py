"""Scaling benchmark: throughput of training on 1, 2, 4, ... ranks, with and without the input pipeline."""
