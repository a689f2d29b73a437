"""Curves without the private part of plotext."""

from __future__ import annotations

import numpy as np
import pytest

from tui.charts.plot import draw_curve


def test_curve_looks_the_same_without_the_private_part(monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.linspace(0.0, 1.0, 50)
    points = ((x.tobytes(), (x**2).tobytes()),)
    draw_curve.cache_clear()
    fast = draw_curve(40, 10, points)
    draw_curve.cache_clear()
    monkeypatch.setattr("tui.charts.plot.skip_color_search", lambda signal: None)
    assert (draw_curve(40, 10, points) == fast).all()
