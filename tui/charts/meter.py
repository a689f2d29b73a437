"""Horizontal meters: a share of a whole as a bar with a resolution of an eighth of a cell."""

from __future__ import annotations

from rich.text import Text

from tui.palette import TRACK

EIGHTHS = " ▏▎▍▌▋▊▉█"


def meter(share: float | None, columns: int, style: str) -> Text:
    """Return a bar of `columns` cells, filled up to `share` (0 to 1) in `style`; an unknown share fills nothing."""
    eighths = round(min(max(share or 0.0, 0.0), 1.0) * columns * 8)
    full, rest = divmod(eighths, 8)
    filled = "█" * full + (EIGHTHS[rest] if rest else "")
    bar = Text(style=TRACK, no_wrap=True, end="")
    bar.append(filled, style)
    return bar.append(" " * (columns - len(filled)))
