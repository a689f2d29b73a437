"""Numbers and times as text of a page. Times are UTC: whoever reads a page may live elsewhere."""

from __future__ import annotations

import math
import time

UNKNOWN = "–"


def number_text(value: float | None, digits: int = 4) -> str:
    """Format a number with this many significant digits and thousands separators."""
    if value is None or not math.isfinite(value):
        return UNKNOWN
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if 10**digits <= abs(value) < 1e15 else f"{value:.{digits}g}"


def percent_text(share: float | None) -> str:
    """Return a share as a percentage; only exact 0 and 1 become 0% and 100%."""
    if share is None or not math.isfinite(share):
        return UNKNOWN
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def time_text(seconds: float | None) -> str:
    """Return Unix seconds as a minute in UTC; a dash for a time that no calendar has."""
    if seconds is None:
        return UNKNOWN
    try:
        return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))
    except (OverflowError, ValueError, OSError):
        return UNKNOWN
