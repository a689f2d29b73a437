"""Formats the images of an inspection: the lines of its lists, and the facts about one image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from rich.cells import cell_len
from rich.text import Text

from engine.runs.inspection import InspectedImage, InspectionInfo
from engine.utils.text import printable
from tui.palette import BAD, GOOD, MUTED, STRONG
from tui.text.confusion import truncate_cells
from tui.text.tables import UNKNOWN, shorten_middle, wrap_text

ListKey = Literal["cell", "mistakes", "doubtful", "labels"]
# The name of each list, and a short one for a narrow terminal.
LIST_TITLES: dict[ListKey, tuple[str, str]] = {
    "cell": ("cell", "cell"),
    "mistakes": ("confident mistakes", "confident"),
    "doubtful": ("most doubtful", "doubtful"),
    "labels": ("suspected wrong labels", "labels?"),
}
FigureName = Literal["loss", "p(pred)", "p(label)", "margin"]
FIGURES: tuple[FigureName, ...] = ("loss", "p(pred)", "p(label)", "margin")
# The figure by which each list is sorted.
SORT_FIGURES: dict[ListKey, FigureName] = {
    "cell": "loss",
    "mistakes": "p(pred)",
    "doubtful": "margin",
    "labels": "p(label)",
}
CLASSES_HEADING = "true → predicted"
ARROW = " → "
FIGURE_COLUMNS = 8
GAP = "  "
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


def format_figure(image: InspectedImage, name: FigureName) -> str:
    """Return a figure of an image for its column of a list."""
    if name == "p(pred)":
        return format_probability(image.probability)
    if name == "p(label)":
        return format_probability(image.label_probability)
    value = image.loss if name == "loss" else image.margin
    return UNKNOWN if math.isnan(value) else f"{value:.4f}" if value < 1000 else f"{value:.2e}"


class ImageLines:
    """The lines of one list, in columns that fit a width: figures, classes and name of each image.

    The figure by which the list is sorted comes first. The classes are those of the title in the list of a cell.
    """

    def __init__(self, key: ListKey, classes: Sequence[str], width: int) -> None:
        self._names, self._width = [printable(name) for name in classes], width
        first = SORT_FIGURES[key]
        others = [name for name in FIGURES if name != first] if width >= MIN_WIDE_COLUMNS else []
        self._figures: list[FigureName] = [first, *others]
        longest = max(map(cell_len, self._names), default=0)
        wanted = 0 if key == "cell" else max(2 * longest + len(ARROW), len(CLASSES_HEADING))
        room = width - len(self._figures) * (FIGURE_COLUMNS + len(GAP)) - len(GAP) - MIN_NAME_COLUMNS
        self._classes = max(min(wanted, room), 0)

    def header(self) -> Text:
        """Return the headings of the columns."""
        line = Text("".join(f"{name:>{FIGURE_COLUMNS}}{GAP}" for name in self._figures), MUTED, no_wrap=True, end="")
        if self._classes:
            line.append(f"{truncate_cells(CLASSES_HEADING, self._classes):<{self._classes}}{GAP}")
        return line.append("image")

    def line(self, image: InspectedImage) -> Text:
        """Return the line of one image."""
        line = Text(no_wrap=True, end="")
        for number, name in enumerate(self._figures):
            line.append(f"{format_figure(image, name):>{FIGURE_COLUMNS}}{GAP}", MUTED if number else "")
        if self._classes:
            line.append(self._pair(image) + GAP, STRONG)
        return line.append(_short_name(printable(image.name), max(self._width - line.cell_len, 0)), MUTED)

    def _pair(self, image: InspectedImage) -> str:
        """Return label and predicted class, truncated and padded to their column."""
        label, predicted = self._names[image.label], self._names[image.predicted]
        room = max(self._classes - len(ARROW), 0)
        if cell_len(label) + cell_len(predicted) > room:
            shown = max(room // 2, room - cell_len(predicted))
            label = truncate_cells(label, shown)
            predicted = truncate_cells(predicted, max(room - cell_len(label), 0))
        pair = f"{label}{ARROW}{predicted}"
        return pair + " " * max(self._classes - cell_len(pair), 0)


def _short_name(name: str, width: int) -> str:
    """Fit the name of an image into `width` cells. Its folder goes first: often, that is the label."""
    return shorten_middle(name if cell_len(name) <= width else name.rpartition("/")[2], width)


def image_path(image: InspectedImage, info: InspectionInfo) -> str | None:
    """Return the full path of the image file; None for a dataset without image files."""
    return str(Path(info.root, image.path)) if info.root is not None and image.path is not None else None


def fact_lines(image: InspectedImage, info: InspectionInfo, width: int) -> list[Text]:
    """Return what is known of one image: label, predicted class, probabilities, loss and path."""
    label, predicted = printable(info.classes[image.label]), printable(info.classes[image.predicted])
    is_right = image.label == image.predicted
    loss, margin = format_figure(image, "loss"), format_figure(image, "margin")
    # The second class of a mistake is often the label, whose probability is known.
    name, probability = printable(info.classes[image.second]), image.probability - image.margin
    second = [] if image.second == image.label else [_class_fact("second", name, probability, "", width)]
    lines = [
        _class_fact("label", label, image.label_probability, STRONG, width),
        _class_fact("predicted", predicted, image.probability, GOOD if is_right else BAD, width),
        *second,
        Text.assemble((f"{'loss':<{FACT_COLUMNS}}", MUTED), loss, ("  margin ", MUTED), margin, no_wrap=True, end=""),
    ]
    path = image_path(image, info)
    room = max(width - FACT_COLUMNS, 1)
    name = shorten_middle(printable(path if path is not None else image.name), MAX_PATH_LINES * room)
    for number, part in enumerate(_split_cells(name, room)):
        lines.append(Text.assemble((f"{'' if number else 'image':<{FACT_COLUMNS}}", MUTED), part, no_wrap=True, end=""))
    return lines


def _class_fact(title: str, name: str, probability: float, style: str, width: int) -> Text:
    tail = f"  {format_probability(probability)}"
    shown = truncate_cells(name, max(width - FACT_COLUMNS - len(tail), 1))
    return Text.assemble((f"{title:<{FACT_COLUMNS}}", MUTED), (shown, style), tail, no_wrap=True, end="")


def _split_cells(text: str, width: int) -> list[str]:
    """Split a path into lines of at most `width` cells; it may have no blank to wrap at."""
    return [line.plain for line in wrap_text(Text(text), width)]
