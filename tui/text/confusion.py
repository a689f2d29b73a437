"""Formats the confusion matrix of a run: names and shares that fit their cells, and the matrix as plain text."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size


def format_percent(share: float) -> str:
    """Format a share as a whole percentage; only exact 0 and 1 become 0% and 100%."""
    if 0 < share < 0.005:
        return "<1%"
    return ">99%" if 0.995 <= share < 1 else f"{share:.0%}"


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Fit names into `width` cells: drop their common prefix if one is too long, then truncate."""
    if max(map(cell_len, names), default=0) <= width:
        return list(names)
    common = os.path.commonprefix(list(names)) if len(names) > 1 else ""  # noqa: RUF071 (of names, not of paths)
    return [truncate_cells(name[len(common) :] or name, width) for name in names]


def truncate_cells(text: str, width: int) -> str:
    """Truncate to `width` terminal cells, with an ellipsis."""
    return text if cell_len(text) <= width else set_cell_size(text, max(width - 1, 0)).rstrip() + "…"


def matrix_lines(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> list[str]:
    """Return the confusion matrix as plain text: true classes in rows, predicted classes in columns."""
    digits = max(len(str(max(map(max, counts)))), 2)
    columns = shorten_names(classes, max(digits, 6))
    width = max(digits, *map(cell_len, columns))
    rows = shorten_names(classes, 20)
    label = max(map(cell_len, rows))
    head = " " * label + "".join(f"  {' ' * (width - cell_len(name))}{name}" for name in columns)
    return [
        head,
        *(
            name + " " * (label - cell_len(name)) + "".join(f"  {count or '.':>{width}}" for count in row)
            for name, row in zip(rows, counts, strict=True)
        ),
    ]
