"""The sentence about a profile: which part of the steps takes the time."""

from __future__ import annotations

import pytest

from engine.runs.profile_file import diagnose_profile
from support.runs.profiles import BALANCED, STARVED, make_profile, make_rank_profile


@pytest.mark.parametrize(
    ("parts", "device_type", "message"),
    [
        (STARVED, "cpu", "waiting for data 60% of the time"),
        (BALANCED, "cpu", "CPU-bound: backward takes 64% of the step"),
        (BALANCED, "cuda", "GPU-bound: backward takes 64% of the step"),
    ],
)
def test_largest_part_is_named(parts: tuple[float, ...], device_type: str, message: str) -> None:
    assert diagnose_profile(make_profile(make_rank_profile(0, parts), device_type=device_type)) == message
