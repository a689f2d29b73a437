"""Limits of the axes of charts. `tui.charts.plot` and `tui.charts.export` draw within them."""

from __future__ import annotations

import math

# An axis begins at zero if at most this share of it lies below the values.
MAX_SHARE_BELOW = 0.15
# Padding a larger limit would overflow to infinity.
MAX_AXIS_LIMIT = 1e307


def pad_limits(low: float, high: float, log: bool) -> tuple[float, float]:
    """Widen the limits of an axis by 5% on each side; a single value gets some room, too.

    An axis of positive values that come near zero begins at zero.
    """
    if log:
        span = math.log10(high) - math.log10(low)
        margin = 0.05 * span if span > 0 else 0.5
        return 10 ** max(math.log10(low) - margin, -307.0), 10 ** min(math.log10(high) + margin, 308.0)
    low, high = max(low, -MAX_AXIS_LIMIT), min(high, MAX_AXIS_LIMIT)
    margin = 0.05 * (high - low) if high > low else abs(low) * 0.1 or 0.5
    if 0 <= low < MAX_SHARE_BELOW * high:
        return 0.0, high + margin
    return low - margin, high + margin
