"""Colors, dashes and fonts of figures. matplotlib is imported on the first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from engine.utils.libraries import import_library

COMMAND = "gputrain report"
# From the color-blind safe palette of Okabe and Ito, in the order of the curves.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999933", "#000000")
# Lengths of dashes and gaps in line widths. Seven patterns and eight colors make 56 different lines.
DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (5, 1.8),
    (1.3, 1.5),
    (6, 1.6, 1.3, 1.6),
    (9, 2),
    (3, 1.3),
    (6, 1.6, 1.3, 1.6, 1.3, 1.6),
)
SETTINGS = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.titlesize": 8,
    "axes.labelsize": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.useoffset": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "legend.handlelength": 3.0,
    # A name with two dollar signs is no formula.
    "text.parse_math": False,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    # Text stays text: selectable, searchable, and in the font of the document.
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
    # Without a salt, the ids of an SVG are random.
    "svg.hashsalt": "gputrain",
    "path.simplify": True,
    "path.simplify_threshold": 0.1,
}


def dashes(index: int) -> tuple[float, ...]:
    """Return the dash pattern of a curve by its index; empty for a solid line."""
    return DASHES[index % len(DASHES)]


@contextmanager
def drawing() -> Iterator[Any]:
    """Set fonts and colors, and yield the class `Figure`. Draw and save within the block.

    Raises UsageError if matplotlib is not installed.
    """
    figure_class = import_library("matplotlib.figure", COMMAND).Figure
    with import_library("matplotlib", COMMAND).rc_context(SETTINGS):
        yield figure_class
