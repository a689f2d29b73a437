"""The confusion matrix of a run: names that fit their cells, the matrix as plain text, mistakes and classes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from engine.base.text import pluralize
from engine.base.units import format_share
from engine.report.classes import ACCURACY, IMAGES, NAME, ClassRow
from engine.report.table import Align, Column, FittedTable, Line, Shorten, cell_width, fit, plain_lines, shorten
from engine.runs.evaluations import Mistake
from tui.charts.meter import meter
from tui.screens.tables import spans, styled
from tui.terminal.palette import MUTED, STRONG, series_style

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MIN_BAR_COLUMNS, MAX_BAR_COLUMNS, MAX_NAME_COLUMNS = 5, 30, 16
MAX_ROW_NAME_COLUMNS, MIN_COUNT_COLUMNS, MIN_WORDS_WIDTH = 20, 6, 36
ARROW = " → "


def scatter_lines(points: NDArray[np.float64], columns: int, rows: int) -> list[str]:
    """Return a scatter plot of predicted numbers, upwards, against true ones, to the right, with the diagonal."""
    low, high = float(points.min()), float(points.max())
    span = high - low or 1.0
    cells = [[" "] * columns for _ in range(rows)]
    for column in range(columns):
        cells[rows - 1 - column * rows // columns][column] = "·"
    for predicted, true in points:
        column = min(int((true - low) / span * columns), columns - 1)
        cells[rows - 1 - min(int((predicted - low) / span * rows), rows - 1)][column] = "●"
    return ["".join(line) for line in cells]


def class_table(rows: Sequence[ClassRow], width: int) -> FittedTable[ClassRow]:
    """Return the table of the screen, which has no header: name, bar, accuracy and number of validation images."""
    shown: list[Column[ClassRow]] = [
        Column("name", NAME.title, NAME.cell, width=8, max_width=MAX_NAME_COLUMNS, priority=2, flex=True, style=STRONG),
        *([ACCURACY, IMAGES] if any(row.images is not None for row in rows) else [ACCURACY]),
    ]
    # Of thousands of classes, only the rows with the widest cells are measured.
    widest = [max(rows, key=lambda row: cell_width(row.name)), max(rows, key=lambda row: row.images or 0)]
    table = fit(shown, widest, width, titles=lambda _: "")
    bar = min(width - sum(table.widths) - 2 * len(shown), MAX_BAR_COLUMNS)
    if bar >= MIN_BAR_COLUMNS:
        shown.insert(1, Column("bar", "", lambda row: bar_cell(row, bar), width=bar))
        table = fit(shown, widest, width, titles=lambda _: "")
    return table


def bar_cell(row: ClassRow, columns: int) -> Line:
    """Return the accuracy of a class as a bar."""
    return () if math.isnan(row.accuracy) else spans(meter(row.accuracy, columns, series_style(1)))


def class_line(table: FittedTable[ClassRow], row: ClassRow) -> Text:
    """Return the line of a class; one without images has no accuracy."""
    has_words = math.isnan(row.accuracy) and len(table.columns) > 1
    rest = (table.columns[1].key, (("no images", MUTED),)) if has_words else None
    return styled(table.line(row, rest=rest))


def mistake_table(worst_mistakes: Sequence[Mistake], names: Sequence[str], width: int) -> FittedTable[Mistake]:
    """Return the table of the screen, which has no header: true and predicted class, images, share of the class."""

    def images(mistake: Mistake) -> str:
        return pluralize(mistake.images, "image") if width >= MIN_WORDS_WIDTH else str(mistake.images)

    columns: list[Column[Mistake]] = [
        Column(
            "pair", "", lambda mistake: ARROW.join((names[mistake.true_class], names[mistake.predicted_class])),
            width=MAX_NAME_COLUMNS, priority=1, flex=True, style=STRONG, shorten=Shorten.MIDDLE,
        ),
        Column("images", "", images, Align.RIGHT),
        Column("share", "", lambda mistake: format_share(mistake.share), Align.RIGHT, style=MUTED),
    ]  # fmt: skip
    return fit(columns, worst_mistakes, width)


def shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Fit names into `width` cells: drop their common prefix if one is too long, then shorten. An ellipsis would take
    too much of a few cells."""
    if max(map(cell_width, names), default=0) <= width:
        return list(names)
    common = os.path.commonprefix(list(names)) if len(names) > 1 else ""  # noqa: RUF071 (of names, not of paths)
    cut = [name[len(common) :] or name for name in names]
    if width >= MIN_COUNT_COLUMNS:
        return [shorten(name, width) for name in cut]
    return [name if cell_width(name) <= width else shorten(name, width + 1)[:-1] for name in cut]


def matrix_lines(classes: Sequence[str], counts: Sequence[Sequence[int]]) -> list[str]:
    """Return the confusion matrix as plain text: true classes in rows, predicted classes in columns."""
    digits = max(len(str(max(map(max, counts)))), 2)
    titles = shorten_names(classes, max(digits, MIN_COUNT_COLUMNS))
    width = max(digits, *map(cell_width, titles))

    def column(index: int) -> Column[tuple[str, Sequence[int]]]:
        return Column(str(index), titles[index], lambda row: str(row[1][index] or "."), Align.RIGHT, width)

    names: Column[tuple[str, Sequence[int]]] = Column("name", "", lambda row: row[0])
    rows = list(zip(shorten_names(classes, MAX_ROW_NAME_COLUMNS), counts, strict=True))
    return plain_lines([names, *map(column, range(len(titles)))], rows)
