"""The colors of the themes: readable on their background, and distinguishable with color blindness."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.color import Color

from tui.terminal.palette import ANSI, DARK, LIGHT, LOADS, SERIES, Palette, load_style, rich_theme

TRUECOLOR = [DARK, LIGHT]


def linear_rgb(color: str) -> NDArray[np.float64]:
    channels = np.array(Color.parse(color).get_truecolor(), np.float64) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast_ratio(first: str, second: str) -> float:
    """Contrast of two colors, from 1 to 21 (WCAG 2.2, relative luminance)."""
    low, high = sorted(float(linear_rgb(color) @ (0.2126, 0.7152, 0.0722)) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", TRUECOLOR, ids=lambda palette: palette.name)
def test_palette_text_is_readable_on_its_background(palette: Palette) -> None:
    texts = (palette.foreground, palette.muted, palette.accent, palette.good, palette.warning, palette.bad)
    assert min(contrast_ratio(text, palette.background) for text in texts) >= 4.5
    assert contrast_ratio(palette.cursor_foreground, palette.cursor_background) >= 7


def test_palette_ansi_uses_only_colors_of_the_terminal() -> None:
    styles = rich_theme(ANSI).styles
    colors = [color for name in (*LOADS, *SERIES) if (color := styles[name].color) is not None]
    assert len(colors) == len(LOADS) + len(SERIES)
    assert all(color.is_system_defined for color in colors)


@pytest.mark.parametrize(("percent", "style"), [(-1, 0), (0, 0), (19.9, 0), (20, 1), (60, 3), (99, 4), (250, 4)])
def test_load_style_has_five_steps(percent: float, style: int) -> None:
    assert load_style(percent) == LOADS[style]
