"""The private part of plotext that is used. Without it, a curve takes twice the time, and looks the same."""

from __future__ import annotations

from typing import Any


def skip_color_search(signal: Any) -> None:
    """Let plotext draw a curve without looking for its color: it asks each point, to give the next curve another one.

    Colors are those of the canvas. It takes 5 of 11 ms of a curve, and pressing a key that zooms draws several."""
    if hasattr(signal, "_get_unique_pixels"):
        signal._get_unique_pixels = list
