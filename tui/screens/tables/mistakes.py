"""The images that `gputrain evaluate --list` and the mistakes screen list: columns, and facts about one image."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from rich.text import Text

from engine.base.text import printable
from engine.base.units import UNKNOWN, format_number
from engine.report.table import Align, Column, Shorten, pad, shorten
from engine.runs.inspection import InspectedImage, InspectionInfo
from tui.screens.tables import wrap_text
from tui.screens.tables.confusion import ARROW
from tui.terminal.palette import BAD, GOOD, MUTED, STRONG

ListKey = Literal["cell", "mistakes", "uncertain", "label-issues"]
# The name of each list, and a short one for a narrow terminal.
LIST_TITLES: dict[ListKey, tuple[str, str]] = {
    "cell": ("cell", "cell"),
    "mistakes": ("confident mistakes", "confident"),
    "uncertain": ("most uncertain", "uncertain"),
    "label-issues": ("suspected wrong labels", "wrong labels"),
}
FIGURE_COLUMNS = 8
FACT_COLUMNS = 11


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


def _figure(title: str, text: Callable[[InspectedImage], str]) -> Column[InspectedImage]:
    return Column(title, title, text, Align.RIGHT, FIGURE_COLUMNS)


LOSS = _figure("loss", lambda image: figure_text(image.loss))
PREDICTED_PROBABILITY = _figure("p(pred)", lambda image: format_probability(image.probability))
LABEL_PROBABILITY = _figure("p(label)", lambda image: format_probability(image.label_probability))
MARGIN = _figure("margin", lambda image: figure_text(image.margin))
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


def image_columns(key: ListKey, classes: Sequence[str]) -> list[Column[InspectedImage]]:
    """Return the columns of a list on the screen. The figure by which the list is sorted comes first.

    The classes are those of the title in the list of a cell.
    """
    first = SORT_FIGURES[key]
    pair: Column[InspectedImage] = Column(
        "classes", "true → predicted", lambda image: ARROW.join((classes[image.label], classes[image.predicted])),
        width=16, priority=2, flex=True, style=STRONG,
    )  # fmt: skip
    # The end of a path tells images apart: often, its folder is the label.
    name: Column[InspectedImage] = Column(
        "image", "image", lambda image: image.name, Align.LEFT, 18, priority=3, flex=True, style=MUTED,
        shorten=Shorten.MIDDLE,
    )  # fmt: skip
    others = [replace(figure, style=MUTED) for figure in FIGURES if figure is not first]
    return [replace(first, priority=4), *others, *([pair] if key != "cell" else []), name]


def image_path(image: InspectedImage, info: InspectionInfo) -> str | None:
    """Return the full path of the image file; None for a dataset without image files."""
    return str(Path(info.root, image.path)) if info.root is not None and image.path is not None else None


def fact_lines(image: InspectedImage, info: InspectionInfo, width: int) -> list[Text]:
    """Return what is known of one image: label, predicted class, probabilities, loss and path."""
    classes, right = info.classes, image.label == image.predicted
    facts = [
        ("label", classes[image.label], STRONG, image.label_probability),
        ("predicted", classes[image.predicted], GOOD if right else BAD, image.probability),
    ]
    # The second class of a mistake is often the label, whose probability is known.
    if image.second != image.label:
        facts.append(("second", classes[image.second], "", image.probability - image.margin))
    lines = []
    for title, name, style, probability in facts:
        tail = f"  {format_probability(probability)}"
        shown = shorten(printable(name), max(width - FACT_COLUMNS - len(tail), 1))
        lines.append(_fact(title, (shown, style), tail))
    lines.append(_fact("loss", figure_text(image.loss), ("  margin ", MUTED), figure_text(image.margin)))
    room = max(width - FACT_COLUMNS, 1)
    path = shorten(printable(image_path(image, info) or image.name), 3 * room, Shorten.MIDDLE)
    parts = wrap_text(Text(path), room)
    return lines + [_fact("" if number else "image", part.plain) for number, part in enumerate(parts)]


def _fact(title: str, *parts: str | tuple[str, str]) -> Text:
    return Text.assemble((pad(title, FACT_COLUMNS), MUTED), *parts, no_wrap=True, end="")
