"""Axes of charts: ticks, their labels, and limits. `tui.charts.plot` and `tui.charts.export` draw the result."""

from __future__ import annotations

import math

# An axis begins at zero if at most this share of it lies below the values.
MAX_SHARE_BELOW = 0.15
# Padding a larger limit would overflow to infinity.
MAX_AXIS_LIMIT = 1e307


def ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten.

    Returns at most `max_ticks` numbers if that is at least 2.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    rough = (high - low) / max(max_ticks - 1, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = [size * power for size in (0.2, 0.5, 1, 2, 5, 10)]
    first_fit = next(index for index, size in enumerate(sizes) if size >= rough * (1 - 1e-9))
    tick_values: list[float] = []
    # If the largest step yields fewer than two ticks, try the next smaller ones.
    for step in reversed(sizes[: first_fit + 1]):
        tick_values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(tick_values) >= min(max_ticks, 2):
            break
    return tick_values


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return the powers of ten between two positive numbers; round numbers if there are fewer than two powers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first < 1:
        return [tick for tick in ticks(low, high, max_ticks) if tick > 0]
    stride = max(1, math.ceil((last - first + 1) / max(max_ticks, 1)))
    return [10.0**power for power in range(first, last + 1, stride)]


# Numbers that need more decimals have an exponent.
MAX_TICK_DECIMALS = 4


def tick_labels(values: list[float], *, log: bool = False) -> list[str]:
    """Format numbers with as few digits as needed to keep them distinct and accurate, with aligned decimals unless they
    are the ticks of a logarithmic axis."""
    if not log and all(abs(value) < 1e6 for value in values):
        for decimals in range(MAX_TICK_DECIMALS + 1):
            labels = [f"{value:.{decimals}f}" for value in values]
            if _are_accurate(labels, values):
                # A tick of a tiny negative number is zero.
                return [label.removeprefix("-") if float(label) == 0 else label for label in labels]
    for digits in range(1, 8):
        labels = [format_number(value, digits) for value in values]
        if _are_accurate(labels, values):
            return labels
    return [f"{value:g}" for value in values]


def _are_accurate(labels: list[str], values: list[float]) -> bool:
    return len(set(labels)) == len(values) and all(
        math.isclose(float(label), value, rel_tol=1e-3, abs_tol=1e-12)
        for label, value in zip(labels, values, strict=True)
    )


def format_number(value: float, digits: int = 4) -> str:
    """Format with `digits` significant digits; whole numbers below a million in full."""
    if abs(value) < 1e6 and value == int(value):
        return str(int(value))
    text = f"{value:.{digits}g}"
    mantissa, exponent, power = text.partition("e")
    return f"{mantissa}e{int(power)}" if exponent else mantissa


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
