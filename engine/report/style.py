"""Colors, dashes and fonts of figures, and how matplotlib draws them: as SVG for a page, or as a file for a paper.

`engine.report.charts` and `engine.report.plot` draw with it. matplotlib is imported on the first use.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.utils.libraries import import_library
from engine.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From the color-blind safe palette of Okabe and Ito, in the order of the curves.
COLORS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#999933", "#000000")
# On a dark page, the two darkest ones are lighter.
DARK_COLORS = ("#4BA3DB", "#E69F00", "#1FBF92", "#DB94BC", "#7CC8F2", "#F0803C", "#B5B54A", "#E6E6E6")
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
FONT_SIZE = 9.0
# Of a figure in another color scheme, each is replaced by a variable of the page's style sheet.
_INK, _GRID, _PAPER = "#010101", "#020202", "#030303"
_NO_METADATA = dict.fromkeys(("Creator", "Date", "Format", "Type"))


@dataclass(frozen=True)
class Theme:
    """Colors of a figure: text and axes, grid lines, background, and the curves."""

    ink: str
    grid: str
    paper: str
    series: Sequence[str]

    def color(self, index: int) -> str:
        return self.series[index % len(self.series)]


PRINT = Theme("#000000", "#DDDDDD", "#FFFFFF", COLORS)
PAGE = Theme(_INK, _GRID, _PAPER, tuple(f"#0401{index:02x}" for index in range(len(COLORS))))
"""Stands for the colors of the page, which depend on light or dark; `to_inline_svg` puts the page's variables there."""
_VARIABLES: Mapping[str, str] = {
    _INK: "var(--ink)",
    _GRID: "var(--grid)",
    _PAPER: "var(--paper)",
    **{color: f"var(--s{index})" for index, color in enumerate(PAGE.series)},
}


def dashes(index: int) -> tuple[float, ...]:
    """Return the dash pattern of a curve by its index; empty for a solid line."""
    return DASHES[index % len(DASHES)]


@contextmanager
def drawing(command: str, theme: Theme, font_size: float = FONT_SIZE) -> Iterator[Any]:
    """Set fonts and colors, and yield the class `Figure`. Draw and save within the block.

    Raises UsageError for `command` if matplotlib is not installed.
    """
    matplotlib = import_library("matplotlib", command)
    figure_class = import_library("matplotlib.figure", command).Figure
    settings = {
        "font.family": "DejaVu Sans",
        "font.size": font_size,
        "axes.titlesize": font_size,
        "axes.labelsize": font_size,
        "xtick.labelsize": font_size - 1,
        "ytick.labelsize": font_size - 1,
        "legend.fontsize": font_size - 1,
        "axes.edgecolor": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.linewidth": 0.6,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.formatter.useoffset": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": theme.grid,
        "grid.linewidth": 0.5,
        "legend.frameon": False,
        "lines.linewidth": 1.3,
        "text.color": theme.ink,
        # A name with two dollar signs is no formula.
        "text.parse_math": False,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
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
    with matplotlib.rc_context(settings):
        yield figure_class


def to_inline_svg(figure: Figure, name: str, title: str) -> str:
    """Return a figure of the theme `PAGE` as an `<svg>` element for HTML, with the colors and the font of the page.

    `name` makes its ids unique within the page; `title` is read by screen readers.
    """
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    text = buffer.getvalue().decode()
    text = text[text.index("<svg") :]
    view_box = re.search(r'viewBox="([^"]*)"', text)
    body = text[text.index(">") + 1 :].rstrip().removesuffix("</svg>")
    # The style of the figure would apply to the whole page.
    body = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", body, count=1, flags=re.S)
    body = body.replace("xlink:href", "href")
    used = set(re.findall(r'(?:url\(|href=")#([\w.-]+)', body))
    body = re.sub(r' id="([^"]*)"', lambda match: match[0] if match[1] in used else "", body)
    body = re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = re.sub(r' transform="rotate\(-0 [^)]*\)"', "", body)
    body = re.sub(r" font-family: [^;\"]*;", "", body)
    body = re.sub(r' d="([^"]*)"', lambda match: f' d="{_short_path(match[1])}"', body)
    body = re.sub(r"#0[1-4][0-9a-f]{4}", lambda match: _VARIABLES.get(match[0], match[0]), body)
    # Groups of one element, now without an id.
    body = re.sub(r"\n\s*", "\n", re.sub(r"</?g>\s*", "", body)) if "<g " not in body else re.sub(r"\n\s*", "\n", body)
    box = view_box[1] if view_box else "0 0 1 1"
    label = html.escape(printable(title))
    return f'<svg class="chart" viewBox="{box}" role="img" aria-label="{label}">{body.strip()}</svg>'


def _short_path(path: str) -> str:
    """Return a path with one decimal, which is a tenth of a point, and without line breaks."""
    numbers = re.sub(r"-?\d+\.\d+", lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), path)
    return re.sub(r"\s*([A-Za-z])\s*", r"\1", numbers.strip())
