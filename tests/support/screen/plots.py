"""Reads drawn plots in tests."""

from __future__ import annotations

from tui.charts.plot import Plot


def plain_rows(plot: Plot) -> list[str]:
    return ["".join(text for text, _ in row) for row in plot.rows]
