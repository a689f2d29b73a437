"""Tests of `engine.base.units`: values as text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from engine.base import units


@pytest.mark.parametrize(
    ("function", "value", "text"),
    [
        (units.format_bytes, 0, "0 B"),
        (units.format_bytes, 999, "999 B"),
        (units.format_bytes, 1023, "1 KiB"),
        (units.format_bytes, 1536, "1.5 KiB"),
        (units.format_bytes, 12.8 * 2**20, "12.8 MiB"),
        (units.format_bytes, 99.96 * 2**20, "100 MiB"),
        (units.format_bytes, 3 * 2**30, "3 GiB"),
        (units.format_bytes, 2**60, "1024 PiB"),
        (units.format_gib, 12.34 * 2**30, "12.3"),
        (units.format_gib, None, "–"),
        (units.format_byte_rate, 0, "0 B/s"),
        (units.format_byte_rate, 12_340, "12.3 KB/s"),
        (units.format_byte_rate, 999_600, "1 MB/s"),
        (units.format_byte_rate, 172e9, "172 GB/s"),
        (units.format_duration, 41.9, "41s"),
        (units.format_duration, 161, "2m41s"),
        (units.format_duration, 7500, "2h05m"),
        (units.format_duration, 90_000, "1d01h"),
        (units.format_age, 59, "59 s"),
        (units.format_age, 10_900, "3 h"),
        (units.format_percent, 87.4, "87%"),
        (units.format_percent, None, "–"),
        (units.format_share, 0.0, "0%"),
        (units.format_share, 0.001, "<1%"),
        (units.format_share, 0.999, ">99%"),
        (units.format_share, 0.995, ">99%"),
        (units.format_share, 1.0, "100%"),
        (units.format_share, None, "–"),
        (units.format_score, 0.0, "0.0000"),
        (units.format_score, 0.91234, "0.9123"),
        (units.format_score, 2e-5, "2e-5"),
        (units.format_rate, 12_345.6, "12,346"),
        (units.format_rate, 1.234, "1.2"),
        (units.format_rate, 0, "0"),
        (units.format_count, 1234, "1,234"),
        (units.format_count, 2.5, "2.5"),
        (units.format_large, 999, "999"),
        (units.format_large, 11_689_512, "11.7 M"),
        (units.format_large, 999_700, "1 M"),
        (units.format_lr, 0.0001, "0.0001"),
        (units.format_lr, 3e-5, "3e-5"),
        (units.format_utc, 0, "1970-01-01 00:00 UTC"),
        (units.format_utc, 1e300, "–"),
        (units.format_date, None, "–"),
    ],
)
def test_values_have_the_digits_and_unit_of_their_kind(
    function: Callable[[float | None], str], value: float | None, text: str
) -> None:
    assert function(value) == text
