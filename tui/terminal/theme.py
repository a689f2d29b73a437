"""The themes of the screens, and which of them the user chose last."""

from __future__ import annotations

import os

from rich.console import Console
from textual.theme import Theme

from engine.base.codec import FileRecord, find_user_record, write_user_record
from engine.base.files import state_folder
from tui.terminal.characters import BASIC_TERMS
from tui.terminal.palette import ANSI, DARK, PALETTES, Palette

THEME_FILE = "theme.json"


class ThemeChoice(FileRecord, frozen=True, kw_only=True):
    """The palette that the user chose last."""

    theme: str


def textual_theme(palette: Palette) -> Theme:
    """Return the Textual theme of a palette, with variables for the style sheets: `$muted`, `$series-1`, `$load-1` …"""

    def css(color: str) -> str:
        return color if color.startswith("#") else f"ansi_{color}"

    cursor_style = "reverse" if palette.ansi else "none"
    names = {
        "border": palette.accent,
        "border-blurred": palette.border,
        "track": palette.track,
        "muted": palette.muted,
        "cursor-foreground": palette.cursor_foreground,
        "cursor-background": palette.cursor_background,
        "block-cursor-foreground": palette.cursor_foreground,
        "block-cursor-background": palette.cursor_background,
        "block-cursor-blurred-foreground": palette.foreground,
        "block-cursor-blurred-background": palette.surface,
        "input-cursor-background": palette.foreground,
        "input-cursor-foreground": palette.background,
        "input-selection-background": palette.cursor_background,
        "input-selection-foreground": palette.cursor_foreground,
        "scrollbar": palette.border,
        "scrollbar-hover": palette.accent,
        "scrollbar-active": palette.accent,
        "scrollbar-background": palette.background,
        "scrollbar-background-hover": palette.background,
        "scrollbar-background-active": palette.background,
        "scrollbar-corner-color": palette.background,
        **{f"series-{number}": color for number, color in enumerate(palette.series, 1)},
        **{f"load-{number}": color for number, color in enumerate(palette.loads, 1)},
    }
    variables = {name: css(color) for name, color in names.items()} | {
        "block-cursor-text-style": cursor_style,
        # The terminal's own cursor colors are unknown: reversed text is visible on all of them.
        "input-cursor-text-style": cursor_style,
    }
    if palette.ansi:
        variables |= {"ansi-background": "ansi_black", "ansi-foreground": "ansi_white"}
    return Theme(
        name=palette.name,
        ansi=palette.ansi,
        dark=palette.dark,
        primary=css(palette.accent),
        secondary=css(palette.series[0]),
        accent=css(palette.accent),
        warning=css(palette.warning),
        error=css(palette.bad),
        success=css(palette.good),
        foreground=css(palette.foreground),
        background=css(palette.background),
        surface=css(palette.surface),
        panel=css(palette.surface),
        boost=css(palette.surface),
        variables=variables,
    )


def settle_terminal_type() -> None:
    """Correct what the environment says of the terminal, before rich reads it."""
    if os.environ.get("TERM") in BASIC_TERMS:
        # Rich believes it, whatever TERM is.
        os.environ.pop("COLORTERM", None)


def why_own_colors() -> str:
    """Return why the terminal keeps its own colors; empty if it shows all palettes.

    `NO_COLOR` (no-color.org) asks for them. Of 16 colors, rich would draw the orange and the red of the others alike.
    """
    if "NO_COLOR" in os.environ:
        return "NO_COLOR is set"
    has_few = Console(force_terminal=True).color_system in (None, "standard")
    return "The terminal has 16 colors or less" if has_few else ""


def initial_palette() -> Palette:
    """Return the palette that the user chose last, else one that the terminal can show."""
    if why_own_colors():
        return ANSI
    saved = find_user_record(state_folder(), THEME_FILE, ThemeChoice)
    return next((palette for palette in PALETTES if saved is not None and palette.name == saved.theme), DARK)


def save_palette(palette: Palette) -> None:
    """Remember the palette for the next start. Raises OSError if it cannot be written."""
    write_user_record(state_folder(), THEME_FILE, ThemeChoice(theme=palette.name))
