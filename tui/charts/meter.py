"""Horizontal meters: a share of a whole as a bar. The bars of adjacent lines do not touch."""

from __future__ import annotations

import math
from functools import lru_cache

from rich.text import Text

from engine.report.table import Line
from tui.terminal.palette import LOADS, MUTED, TRACK

# They differ without color, too.
SQUARE, EMPTY = "■", "□"


def meter(share: float | None, columns: int, style: str) -> Text:
    """Return a bar of `columns` cells, filled up to `share` (0 to 1) in `style`; an unknown share fills nothing."""
    filled = SQUARE * _filled(share or 0.0, columns)
    bar = Text(no_wrap=True, end="")
    bar.append(filled, style)
    return bar.append(EMPTY * (columns - len(filled)), TRACK)


def load_meter(share: float | None, columns: int) -> Line:
    """Return a bar of a load that is colored from calm to hot along its length; an unknown share is dotted."""
    if share is None:
        return (("┄" * columns, MUTED),) if columns else ()
    return _load_bar(_filled(share, columns), columns)


@lru_cache(maxsize=1024)
def _load_bar(length: int, columns: int) -> Line:
    """Return a bar with its first `length` columns filled, one piece per color."""
    # Each color begins at the first column whose share of the bar has that color.
    starts = [math.ceil(columns * step / len(LOADS)) for step in range(len(LOADS) + 1)]
    pieces = [
        (SQUARE * (min(end, length) - start), style)
        for start, end, style in zip(starts, starts[1:], LOADS, strict=False)
    ]
    return tuple((text, style) for text, style in (*pieces, (EMPTY * (columns - length), TRACK)) if text)


def _filled(share: float, columns: int) -> int:
    return round(min(max(share, 0.0), 1.0) * columns)
