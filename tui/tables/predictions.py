"""The table of `gputrain predict`: an image, its most probable class and the runners-up."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.show.table import NO_LIMIT, Column, FittedTable, cell_width, fit, line_text
from engine.utils.text import printable
from engine.utils.units import format_score

if TYPE_CHECKING:
    from engine.inference.predict import Prediction


def prediction_table(paths: Iterable[str], classes: Sequence[str]) -> FittedTable[Prediction]:
    """Return the table for images of these paths, which are not shortened.

    The lines are printed one by one as the predictions arrive, so no prediction is measured.
    """
    columns: tuple[Column[Prediction], ...] = (
        Column("image", "", lambda row: str(row.file.path), width=_longest(paths)),
        Column("class", "", lambda row: row.classes[0][0], width=_longest(classes)),
        Column("probability", "", lambda row: format_score(row.classes[0][1]), width=len("0.1234")),
        Column("others", "", runners_up),
    )
    return fit(columns, [], NO_LIMIT)


def prediction_line(table: FittedTable[Prediction], prediction: Prediction) -> str:
    """Return the line of an image."""
    return line_text(table.line(prediction, rest=("others", runners_up(prediction))))


def runners_up(prediction: Prediction) -> str:
    """Return the other classes with their probability."""
    return ", ".join(f"{name} {format_score(probability)}" for name, probability in prediction.classes[1:])


def _longest(texts: Iterable[str]) -> int:
    return max((cell_width(printable(text)) for text in texts), default=0)
