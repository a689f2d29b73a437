"""The images that `gputrain evaluate --list` and the mistakes screen list: columns, and facts about one image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.text import Text

from engine.runs.inspection import InspectedImage, InspectionInfo
from engine.show.table import GAP, Align, Column, Shorten, cell_width, pad, shorten
from engine.utils.text import printable
from engine.utils.units import UNKNOWN, format_number
from tui.palette import BAD, GOOD, MUTED, STRONG
from tui.tables import wrap_text
from tui.tables.confusion import ARROW, shorten_pair

ListKey = Literal["cell", "mistakes", "uncertain", "label-issues"]
# The name of each list, and a short one for a narrow terminal.
LIST_TITLES: dict[ListKey, tuple[str, str]] = {
    "cell": ("cell", "cell"),
    "mistakes": ("confident mistakes", "confident"),
    "uncertain": ("most uncertain", "uncertain"),
    "label-issues": ("suspected wrong labels", "labels?"),
}
CLASSES_HEADING = "true → predicted"
FIGURE_COLUMNS = 8
MIN_NAME_COLUMNS = 12
# From this width on, a list has all figures.
MIN_WIDE_COLUMNS = 72
FACT_COLUMNS = 11
MAX_PATH_LINES = 3


def format_probability(probability: float) -> str:
    """Format a probability as a percentage with two decimals; only exact 0 and 1 become 0% and 100%."""
    if math.isnan(probability):
        return UNKNOWN
    if 0 < probability < 0.00005:
        return "<0.01%"
    return ">99.99%" if 0.99995 <= probability < 1 else f"{probability:.2%}"


def figure_text(value: float) -> str:
    """Format a loss or a margin in at most `FIGURE_COLUMNS` cells."""
    return UNKNOWN if math.isnan(value) else f"{value:.4f}" if value < 1000 else format_number(value, 3)


LOSS: Column[InspectedImage] = Column(
    "loss", "loss", lambda image: figure_text(image.loss), Align.RIGHT, FIGURE_COLUMNS
)
PREDICTED_PROBABILITY: Column[InspectedImage] = Column(
    "p(pred)", "p(pred)", lambda image: format_probability(image.probability), Align.RIGHT, FIGURE_COLUMNS
)
LABEL_PROBABILITY: Column[InspectedImage] = Column(
    "p(label)", "p(label)", lambda image: format_probability(image.label_probability), Align.RIGHT, FIGURE_COLUMNS
)
MARGIN: Column[InspectedImage] = Column(
    "margin", "margin", lambda image: figure_text(image.margin), Align.RIGHT, FIGURE_COLUMNS
)
FIGURES = (LOSS, PREDICTED_PROBABILITY, LABEL_PROBABILITY, MARGIN)
# The figure by which each list is sorted.
SORT_FIGURES = {"cell": LOSS, "mistakes": PREDICTED_PROBABILITY, "uncertain": MARGIN, "label-issues": LABEL_PROBABILITY}


def plain_columns(classes: Sequence[str]) -> list[Column[InspectedImage]]:
    """Return the columns of `gputrain evaluate --list`, whose cells are not shortened: paths are copied."""
    return [
        Column("image", "image", lambda image: image.name),
        Column("label", "label", lambda image: classes[image.label]),
        Column("predicted", "predicted", lambda image: classes[image.predicted]),
        Column("second", "second", lambda image: classes[image.second]),
        *(PREDICTED_PROBABILITY, LABEL_PROBABILITY, MARGIN, LOSS),
    ]


def image_columns(key: ListKey, classes: Sequence[str], width: int) -> list[Column[InspectedImage]]:
    """Return the columns of a list on the screen for lines of `width` cells.

    The figure by which the list is sorted comes first. The classes are those of the title in the list of a cell.
    """
    names = [printable(name) for name in classes]
    first = SORT_FIGURES[key]
    others = [figure for figure in FIGURES if figure is not first] if width >= MIN_WIDE_COLUMNS else []
    longest = max(map(cell_width, names), default=0)
    wanted = 0 if key == "cell" else max(2 * longest + len(ARROW), len(CLASSES_HEADING))
    room = width - (1 + len(others)) * (FIGURE_COLUMNS + len(GAP))
    pair = max(min(wanted, room - len(GAP) - MIN_NAME_COLUMNS), 0)

    def pair_cell(image: InspectedImage) -> str:
        return ARROW.join(shorten_pair(names[image.label], names[image.predicted], pair))

    classes_column: Column[InspectedImage] = Column(
        "classes", CLASSES_HEADING, pair_cell, width=pair, flex=True, style=STRONG
    )
    rest = max(room - (pair + len(GAP) if pair else 0), 0)
    return [
        first,
        *(replace(figure, style=MUTED) for figure in others),
        *([classes_column] if pair else []),
        Column("image", "image", lambda image: _short_name(printable(image.name), rest), width=rest, style=MUTED),
    ]


def _short_name(name: str, width: int) -> str:
    """Fit the name of an image into `width` cells. Its folder goes first: often, that is the label."""
    return shorten(name if cell_width(name) <= width else name.rpartition("/")[2], width, Shorten.MIDDLE)


def image_path(image: InspectedImage, info: InspectionInfo) -> str | None:
    """Return the full path of the image file; None for a dataset without image files."""
    return str(Path(info.root, image.path)) if info.root is not None and image.path is not None else None


def fact_lines(image: InspectedImage, info: InspectionInfo, width: int) -> list[Text]:
    """Return what is known of one image: label, predicted class, probabilities, loss and path."""
    label, predicted = printable(info.classes[image.label]), printable(info.classes[image.predicted])
    is_right = image.label == image.predicted
    loss, margin = figure_text(image.loss), figure_text(image.margin)
    # The second class of a mistake is often the label, whose probability is known.
    name, probability = printable(info.classes[image.second]), image.probability - image.margin
    second = [] if image.second == image.label else [_class_fact("second", name, probability, "", width)]
    lines = [
        _class_fact("label", label, image.label_probability, STRONG, width),
        _class_fact("predicted", predicted, image.probability, GOOD if is_right else BAD, width),
        *second,
        _fact("loss", loss, ("  margin ", MUTED), margin),
    ]
    path = image_path(image, info)
    room = max(width - FACT_COLUMNS, 1)
    name = shorten(printable(path if path is not None else image.name), MAX_PATH_LINES * room, Shorten.MIDDLE)
    for number, part in enumerate(_split_cells(name, room)):
        lines.append(_fact("" if number else "image", part))
    return lines


def _class_fact(title: str, name: str, probability: float, style: str, width: int) -> Text:
    tail = f"  {format_probability(probability)}"
    shown = shorten(name, max(width - FACT_COLUMNS - len(tail), 1))
    return _fact(title, (shown, style), tail)


def _fact(title: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((pad(title, FACT_COLUMNS), MUTED), *parts, no_wrap=True, end="")


def _split_cells(text: str, width: int) -> list[str]:
    """Split a path into lines of at most `width` cells; it may have no blank to wrap at."""
    return [line.plain for line in wrap_text(Text(text), width)]
