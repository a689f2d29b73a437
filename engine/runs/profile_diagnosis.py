"""Diagnose a profile: name the largest part of the steps.

The words and limits are those of `engine.runs.bottleneck`, which diagnoses whole epochs.
"""

from __future__ import annotations

import statistics

from engine.runs.bottleneck import MAX_DATA_WAIT_SHARE
from engine.runs.profile_file import PARTS, Profile


def diagnose_profile(profile: Profile) -> str:
    """Return what takes the time of the profiled steps, as one sentence."""
    shares = {
        part: statistics.fmean(rank.mean(part) / max(rank.step_seconds, 1e-9) for rank in profile.ranks)
        for part in PARTS
    }
    if shares["data"] > MAX_DATA_WAIT_SHARE:
        return f"waiting for data {shares['data']:.0%} of the time"
    largest = max(PARTS, key=lambda part: shares[part])
    device = "GPU" if profile.device_type == "cuda" else "CPU"
    return f"{device}-bound: {largest} takes {shares[largest]:.0%} of the step"
