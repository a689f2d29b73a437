"""The colors of the themes: readable on their background, and distinguishable with color blindness."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.typing import NDArray
from rich.color import Color

from tui.palette import ANSI, DARK, LIGHT, LOADS, SERIES, Palette, load_style, rich_theme

# Severity 1.0 (Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency,
# IEEE TVCG 2009).
VISIONS = {
    "normal": np.eye(3),
    "protan": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deutan": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritan": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
MIN_SERIES_DISTANCE = 12.0
"""In CIELAB, where about 2.3 is the smallest difference that people see."""
TRUECOLOR = [DARK, LIGHT]


def linear_rgb(color: str) -> NDArray[np.float64]:
    channels = np.array(Color.parse(color).get_truecolor(), np.float64) / 255
    return np.where(channels <= 0.04045, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)


def contrast_ratio(first: str, second: str) -> float:
    """Contrast of two colors, from 1 to 21 (WCAG 2.2, relative luminance)."""
    low, high = sorted(float(linear_rgb(color) @ (0.2126, 0.7152, 0.0722)) for color in (first, second))
    return (high + 0.05) / (low + 0.05)


def lab(rgb: NDArray[np.float64]) -> NDArray[np.float64]:
    """CIELAB coordinates of linear sRGB (D65)."""
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    ratios = to_xyz @ rgb / to_xyz.sum(1)
    x, y, z = np.where(ratios > (6 / 29) ** 3, np.cbrt(ratios), ratios / (3 * (6 / 29) ** 2) + 4 / 29)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("palette", TRUECOLOR, ids=lambda palette: palette.name)
def test_palette_text_is_readable_on_its_background(palette: Palette) -> None:
    texts = (palette.foreground, palette.muted, palette.accent, palette.good, palette.warning, palette.bad)
    assert min(contrast_ratio(text, palette.background) for text in texts) >= 4.5
    assert contrast_ratio(palette.cursor_foreground, palette.cursor_background) >= 7


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("palette", TRUECOLOR, ids=lambda palette: palette.name)
def test_palette_series_differ_with_color_blindness(palette: Palette, vision: str) -> None:
    seen = [lab(np.clip(VISIONS[vision] @ linear_rgb(color), 0, 1)) for color in palette.series]
    distances = {
        (first + 1, second + 1): float(np.linalg.norm(seen[first] - seen[second]))
        for first, second in itertools.combinations(range(len(seen)), 2)
    }
    assert min(distances.values()) >= MIN_SERIES_DISTANCE, distances


def test_palette_ansi_uses_only_colors_of_the_terminal() -> None:
    styles = rich_theme(ANSI).styles
    colors = [color for name in (*LOADS, *SERIES) if (color := styles[name].color) is not None]
    assert len(colors) == len(LOADS) + len(SERIES)
    assert all(color.is_system_defined for color in colors)


@pytest.mark.parametrize(("percent", "style"), [(-1, 0), (0, 0), (19.9, 0), (20, 1), (60, 3), (99, 4), (250, 4)])
def test_load_style_has_five_steps(percent: float, style: int) -> None:
    assert load_style(percent) == LOADS[style]
