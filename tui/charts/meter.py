"""Horizontal meters: a share of a whole as a bar. The bars of adjacent lines do not touch."""

from __future__ import annotations

import math
from functools import lru_cache

from rich.text import Text

from tui.palette import LOADS, MUTED, TRACK

SQUARE = "■"


def meter(share: float | None, columns: int, style: str) -> Text:
    """Return a bar of `columns` cells, filled up to `share` (0 to 1) in `style`; an unknown share fills nothing."""
    filled = SQUARE * _filled(share or 0.0, columns)
    bar = Text(no_wrap=True, end="")
    bar.append(filled, style)
    return bar.append(SQUARE * (columns - len(filled)), TRACK)


def load_meter(share: float | None, columns: int) -> Text:
    """Return a bar of a load that is colored from calm to hot along its length; an unknown share is dotted."""
    if share is None:
        return Text("┄" * columns, MUTED, no_wrap=True, end="")
    return _load_bar(_filled(share, columns), columns)


@lru_cache(maxsize=1024)
def _load_bar(length: int, columns: int) -> Text:
    """Return a bar with its first `length` columns filled. The result is cached; do not modify it."""
    filled = SQUARE * length
    bar = Text(no_wrap=True, end="")
    # One piece per color, each from the first column whose share of the bar has that color.
    starts = [math.ceil(columns * step / len(LOADS)) for step in range(len(LOADS) + 1)]
    for start, end, style in zip(starts, starts[1:], LOADS, strict=False):
        if start < len(filled):
            bar.append(filled[start:end], style)
    return bar.append(SQUARE * (columns - len(filled)), TRACK)


def _filled(share: float, columns: int) -> int:
    return round(min(max(share, 0.0), 1.0) * columns)
