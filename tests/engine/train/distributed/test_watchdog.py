"""Timeout of the process group relative to the watchdog."""

from __future__ import annotations

from datetime import timedelta

import pytest

from engine.config.loader import resolve_config
from engine.train.distributed.watchdog import collective_timeout_s


@pytest.mark.parametrize(
    ("overrides", "expected_s"),
    [
        ([], 660.0),
        (["run.watchdog=0"], 600.0),
        (["device.timeout=3600"], 3600.0),
        (["device.timeout=5", "run.watchdog=5"], 65.0),
    ],
    ids=["default", "no watchdog", "longer timeout", "equal"],
)
def test_collective_timeout_outlasts_watchdog(overrides: list[str], expected_s: float) -> None:
    config = resolve_config(None, overrides).config
    assert collective_timeout_s(config.device.timeout, config.run.watchdog) == expected_s


def test_collective_timeout_of_huge_watchdog_fits_into_timedelta() -> None:
    assert timedelta(seconds=collective_timeout_s(600.0, 1e300)) > timedelta(days=365)
