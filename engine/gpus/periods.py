"""Bound of the sampling period. Apart from `engine.gpus.snapshot`, which the CLI does not import for its help."""

from __future__ import annotations

MIN_PERIOD_SECONDS = 0.25
