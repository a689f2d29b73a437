"""Names of the text styles on all screens, and the colors of each theme. Color never carries meaning alone.

Text uses the style names only. `tui.terminal.theme` turns a `Palette` into a Textual theme, and `rich_theme` turns it
into the rich styles that the names stand for. `tests/tui/terminal/test_palette.py` checks contrast, and that people
with color blindness can tell the series apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.theme import Theme

STRONG = "bold"
# Rich resolves a name only where it is the whole style: `"bold gt.good"` is an error.
MUTED = "gt.muted"
GOOD, WARNING, BAD = "gt.good", "gt.warning", "gt.bad"
ACCENT = "gt.accent"
FREE = "gt.free"
NOTICE = "gt.notice"
TRACK = "gt.track"
CURSOR, CURSOR_BLURRED = "gt.cursor", "gt.cursor-blurred"
SERIES = tuple(f"gt.series{number}" for number in range(1, 9))
LOADS = tuple(f"gt.load{number}" for number in range(1, 6))
# Cells of the confusion matrix by increasing share of their row: correct and wrong predictions.
CORRECT = tuple(f"gt.correct{number}" for number in range(1, 6))
WRONG = tuple(f"gt.wrong{number}" for number in range(1, 6))
# Share of the color in the background of these cells.
CELL_SHARES = (0.2, 0.35, 0.5, 0.7, 0.95)
# In 256 colors. Terminals with 16 colors map them to blue (correct) and red to yellow.
ANSI_CORRECT = (
    *("color(231) on color(17)", "color(231) on color(18)", "color(231) on color(25)"),
    *("color(16) on color(32)", "bold color(16) on color(75)"),
)
ANSI_WRONG = (
    *("color(231) on color(52)", "color(231) on color(88)", "color(231) on color(130)"),
    *("color(16) on color(172)", "bold color(16) on color(214)"),
)


def load_style(percent: float) -> str:
    """Return the style of a load in percent: one of five steps from calm to hot."""
    return LOADS[min(max(int(percent // 20), 0), len(LOADS) - 1)]


def series_style(number: int) -> str:
    """Return the style of curve `number`, counted from 1; it repeats after 8."""
    return SERIES[(number - 1) % len(SERIES)]


def theme_variable(series: str) -> str:
    """Return the theme variable of a curve's style, for the markup of a border title."""
    return f"$series-{SERIES.index(series) + 1}"


def pale_style(series: str) -> str:
    """Return the style of a curve that is in the background of its smoothed version."""
    return f"{series}-pale"


@dataclass(frozen=True)
class Palette:
    """The colors of one theme, as `#rrggbb` or names of the terminal's own colors (`ansi`)."""

    name: str
    ansi: bool
    dark: bool
    background: str
    surface: str
    foreground: str
    muted: str
    accent: str
    border: str
    track: str
    cursor_foreground: str
    cursor_background: str
    good: str
    warning: str
    bad: str
    loads: tuple[str, str, str, str, str]
    series: tuple[str, str, str, str, str, str, str, str]


DARK = Palette(
    name="gputrain-dark",
    ansi=False,
    dark=True,
    background="#10151c",
    surface="#18202a",
    foreground="#d5dce4",
    muted="#8d9aa9",
    accent="#4cc4d8",
    border="#364351",
    track="#28323e",
    cursor_foreground="#f2f6fa",
    cursor_background="#1c3349",
    good="#4ec48c",
    warning="#f0b64d",
    bad="#ff7566",
    loads=("#35b5a5", "#86c166", "#e6c84f", "#f0923c", "#f2605c"),
    series=("#57a2c7", "#ff9213", "#2fda88", "#d19ba2", "#f4f900", "#f44525", "#b86efa", "#a1ff92"),
)
LIGHT = Palette(
    name="gputrain-light",
    ansi=False,
    dark=False,
    background="#fbfbf9",
    surface="#f0f2f3",
    foreground="#22292f",
    muted="#5d6872",
    accent="#00708a",
    border="#c3cad1",
    track="#e1e5e9",
    cursor_foreground="#10151c",
    cursor_background="#d8e9f5",
    good="#177a4c",
    warning="#9a6200",
    bad="#c42b1c",
    loads=("#14877c", "#4f8a10", "#a07c00", "#c65d00", "#c42b1c"),
    series=("#125cd7", "#df6300", "#196c64", "#a38363", "#72562c", "#ab4500", "#1097c9", "#493da3"),
)
ANSI = Palette(
    name="gputrain-ansi",
    ansi=True,
    dark=True,
    background="default",
    surface="default",
    foreground="default",
    muted="bright_black",
    accent="cyan",
    border="bright_black",
    track="bright_black",
    cursor_foreground="black",
    cursor_background="cyan",
    good="green",
    warning="yellow",
    bad="red",
    loads=("cyan", "green", "yellow", "bright_yellow", "red"),
    series=("bright_blue", "yellow", "green", "magenta", "bright_yellow", "red", "cyan", "white"),
)
PALETTES = (DARK, LIGHT, ANSI)


def cell_styles(palette: Palette, color: str) -> list[str]:
    """Return rich styles of matrix cells, from the background toward `color`, with dark or light text as readable."""
    styles = []
    for share in CELL_SHARES:
        ground = blend(palette.background, color, share)
        texts = sorted((palette.foreground, palette.background), key=lambda text: -abs(_light(text) - _light(ground)))
        styles.append(f"{texts[0]} on {ground}")
    return styles


def blend(first: str, second: str, share: float) -> str:
    """Return a color `share` of the way from the first to the second; all as `#rrggbb`."""
    pairs = ((int(first[index : index + 2], 16), int(second[index : index + 2], 16)) for index in (1, 3, 5))
    return "#" + "".join(f"{round(a + (b - a) * share):02x}" for a, b in pairs)


def _light(color: str) -> float:
    """Return the approximate lightness of `#rrggbb`, 0 to 255 (luma, ITU-R BT.709)."""
    red, green, blue = (int(color[index : index + 2], 16) for index in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def rich_theme(palette: Palette) -> Theme:
    """Return the rich styles that the style names stand for."""
    # The terminal's own colors may be unreadable on each other, so that theme reverses or dims instead of coloring.
    if palette.ansi:
        cursor, blurred, muted, notice = "reverse", "bold", "dim", "bold reverse"
    else:
        cursor = f"{palette.cursor_foreground} on {palette.cursor_background}"
        blurred, muted = f"on {palette.surface}", palette.muted
        notice = f"bold {palette.background} on {palette.warning}"
    correct = ANSI_CORRECT if palette.ansi else cell_styles(palette, palette.series[0])
    wrong = ANSI_WRONG if palette.ansi else cell_styles(palette, palette.bad)
    return Theme(
        {
            MUTED: muted,
            GOOD: palette.good,
            WARNING: palette.warning,
            BAD: f"bold {palette.bad}",
            ACCENT: f"bold {palette.accent}",
            FREE: f"bold {palette.good}",
            NOTICE: notice,
            # A color, if only the default one: the cursor leaves it dimmer than the full part of a meter.
            TRACK: f"{muted} default" if palette.ansi else palette.track,
            CURSOR: cursor,
            CURSOR_BLURRED: blurred,
            **dict(zip(LOADS, palette.loads, strict=True)),
            **dict(zip(SERIES, palette.series, strict=True)),
            **dict(zip(CORRECT, correct, strict=True)),
            **dict(zip(WRONG, wrong, strict=True)),
            **{pale_style(name): f"dim {color}" for name, color in zip(SERIES, palette.series, strict=True)},
        }
    )
