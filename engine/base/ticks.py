"""Ticks of charts and their labels. `engine.report` draws them in figures, `tui.charts` on the screen."""

from __future__ import annotations

import math

from engine.base.units import format_number

# Digits of the ticks within a decade of a logarithmic axis, from few to many.
LOG_DIGITS = ((1,), (1, 3), (1, 2, 5))


def ticks(low: float, high: float, max_ticks: int, *, whole: bool = False) -> list[float]:
    """Return round numbers from `low` to `high`, in steps of 1, 2 or 5 times a power of ten.

    Returns at most `max_ticks` numbers if that is at least 2. With `whole`, they are whole numbers, unless there are
    fewer than two of them.
    """
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    whole = whole and math.floor(high) > math.ceil(low)
    rough = max((high - low) / max(max_ticks - 1, 1), 1.0 if whole else 0.0)
    power = 10.0 ** math.floor(math.log10(rough))
    sizes = [size * power for size in (0.2, 0.5, 1, 2, 5, 10) if not whole or size * power >= 1]
    first_fit = next(index for index, size in enumerate(sizes) if size >= rough * (1 - 1e-9))
    tick_values: list[float] = []
    # If the largest step yields fewer than two ticks, try the next smaller ones.
    for step in reversed(sizes[: first_fit + 1]):
        tick_values = [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
        if len(tick_values) >= min(max_ticks, 2):
            break
    return tick_values


def log_ticks(low: float, high: float, max_ticks: int) -> list[float]:
    """Return at most `max_ticks` ticks of a logarithmic axis between two positive numbers: at least two if possible.

    They are round numbers in equal steps within a decade, otherwise powers of ten with 2 and 5, or 3, between them.
    """
    even = [tick for tick in ticks(low, high, max_ticks) if tick > 0]
    if high < 10 * low and 2 <= len(even) <= max_ticks:
        return even
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    fitting: list[float] = []
    for digits in LOG_DIGITS:
        values = [float(f"{digit}e{decade}") for decade in decades for digit in digits]
        values = [value for value in values if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]
        if len(values) > max_ticks:
            return fitting if len(fitting) >= 2 else values[:: math.ceil(len(values) / max(max_ticks, 1))]
        fitting = values
    return fitting if len(fitting) >= 2 else even


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
