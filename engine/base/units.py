"""Values as text, each kind of value once: sizes, durations, ages, dates, shares, rates, counts, learning rates; and
sizes that a user types.

`engine.runs.metrics` and `engine.report.readings` choose one of these functions by the unit of a metric or a reading.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable

UNKNOWN = "–"
"""Placeholder for an unknown value."""
GIB = 2**30
BYTE_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s*([KMGT])(?:i?B)?", re.ASCII | re.IGNORECASE)
RATE_UNITS = ("B/s", "KB/s", "MB/s", "GB/s", "TB/s")
LARGE_UNITS = ("", " k", " M", " B")
AGE_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
# Scores of at least this and below the other have four decimals.
MIN_DECIMAL_SCORE, MAX_DECIMAL_SCORE = 1e-3, 1e5


def format_bytes(size: float) -> str:
    """Format a size in powers of 1024: `512 B`, `12.8 MiB`, `3 GiB`."""
    return _scaled(size, 1024, BYTE_UNITS)


def parse_size(text: str) -> int | None:
    """Return the bytes of a size with a unit in powers of 1024, as Slurm and nvidia-smi mean it: `20G`, `512 MiB`.

    None if the text is no such size, or not positive."""
    match = _SIZE.fullmatch(text.strip())
    size = 0 if match is None else int(float(match[1]) * 1024 ** (1 + "KMGT".index(match[2].upper())))
    return size if 0 < size <= 1 << 50 else None


def format_gib(size: float | None) -> str:
    """Format a size in GiB without its unit, for a column or a pair of sizes that names the unit once: `12.8`."""
    return UNKNOWN if size is None else f"{size / GIB:.1f}"


def format_byte_rate(bytes_per_s: float) -> str:
    """Format a transfer rate in powers of 1000, as NVIDIA's tools do: `12.4 GB/s`."""
    return _scaled(bytes_per_s, 1000, RATE_UNITS)


def _scaled(value: float, base: int, units: tuple[str, ...]) -> str:
    """Return a value with at most three digits before its unit; whole ones in the first unit."""
    power = 0
    # 999.5 is shown as 1000, which has four digits.
    while value >= 999.5 and power < len(units) - 1:
        value, power = value / base, power + 1
    text = f"{value:.{1 if power and value < 99.95 else 0}f}"
    return f"{text.removesuffix('.0')} {units[power]}"


def format_duration(seconds: float) -> str:
    """Format a duration in its two largest units: `2h05m`, `2m41s`, `41s`."""
    whole = int(seconds)
    if whole >= 86400:
        return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
    if whole >= 3600:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 60}m{whole % 60:02d}s" if whole >= 60 else f"{whole}s"


def format_age(seconds: float) -> str:
    """Format an age in its largest unit: `3 h`."""
    for size, unit in AGE_UNITS:
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{int(seconds)} s"


def format_date(seconds: float | None) -> str:
    """Format Unix seconds as a local minute, as queries take it: `2026-11-01 14:30`."""
    return UNKNOWN if seconds is None else _calendar_text(time.localtime, seconds)


def format_utc(seconds: float | None) -> str:
    """Format Unix seconds as a minute in UTC, for pages that are read elsewhere."""
    text = UNKNOWN if seconds is None else _calendar_text(time.gmtime, seconds)
    return text if text == UNKNOWN else f"{text} UTC"


def _calendar_text(calendar: Callable[[float], time.struct_time], seconds: float) -> str:
    try:
        return time.strftime("%Y-%m-%d %H:%M", calendar(seconds))
    except (OverflowError, ValueError, OSError):
        # No calendar has this time.
        return UNKNOWN


def format_percent(percent: float | None) -> str:
    """Format a percentage without decimals: `87%`."""
    return UNKNOWN if percent is None else f"{percent:.0f}%"


def format_share(share: float | None) -> str:
    """Format a share of 1 as a percentage. Only exact 0 and 1 become `0%` and `100%`."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def format_score(value: float | None) -> str:
    """Format a loss, an accuracy or another score with the four digits that people compare; None is unknown."""
    if value is None:
        return UNKNOWN
    if value == 0 or MIN_DECIMAL_SCORE <= abs(value) < MAX_DECIMAL_SCORE:
        return f"{value:.4f}"
    return format_number(value, 3)


def format_rate(per_s: float) -> str:
    """Format images or other items per second; slow rates with two digits."""
    return f"{per_s:,.0f}" if per_s >= 10 or per_s == 0 else f"{per_s:.2g}"


def format_count(count: float) -> str:
    """Format a count with thousands separators; the mean of several counts has one decimal."""
    return f"{count:,.0f}" if count == int(count) else f"{count:,.1f}"


def format_large(count: float) -> str:
    """Format a large count with three digits: `11.7 M`, `1.24 B`."""
    power = 0
    while abs(count) >= 999.5 and power < len(LARGE_UNITS) - 1:
        count, power = count / 1000, power + 1
    return f"{count:.3g}{LARGE_UNITS[power]}"


def format_lr(lr: float) -> str:
    """Format a learning rate with three significant digits: `0.05`, `1e-4`."""
    return format_number(lr, 3)


def format_number(value: float, digits: int = 4) -> str:
    """Format with `digits` significant digits; whole numbers below a million in full."""
    if abs(value) < 1e6 and value == int(value):
        return str(int(value))
    text = f"{value:.{digits}g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa
