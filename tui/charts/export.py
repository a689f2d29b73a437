"""Export of a chart: the visible window as SVG, all points as CSV. `tui.screens.run` calls it."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from xml.sax.saxutils import escape

from engine.report.style import COLORS
from engine.runs.series import Series, downsample_min_max
from engine.utils.text import printable
from engine.utils.ticks import log_ticks, tick_labels, ticks
from tui.charts.axis import pad_limits
from tui.charts.plot import LINE_MARKERS, WHOLE_AXES, Curve, PlotWindow, smoothed_series, visible_series

Scale = Callable[[float], float]

WIDTH, HEIGHT = 900, 480
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 40, 50


# Entries of the legend: beside the title if their labels are short, else in lines below it.
ENTRY_WIDTH, MAX_SHORT_LABEL, MAX_ENTRIES_BESIDE_TITLE = 110, 8, 5
LONG_ENTRY_WIDTH, LINE_HEIGHT, MAX_LABEL = 280, 20, 34
DASHES = ' stroke-dasharray="6 4"'


def export_chart(
    run_name: str, chart_id: str, curves: Sequence[Curve], window: PlotWindow, x_label: str, folder: Path
) -> list[Path]:
    """Write the window as SVG and all points as CSV, and return both paths.

    The files are named after run and chart, with a number if the name is in use. Raises OSError if writing fails.
    """
    name = f"{run_name}-{chart_id}"
    for number in count(1):
        stem = name if number == 1 else f"{name}-{number}"
        paths = [folder / f"{stem}.svg", folder / f"{stem}.csv"]
        if not any(path.exists() for path in paths):
            break
    svg = to_svg(curves, window, printable(name), x_label)
    with paths[0].open("x", encoding="utf-8") as file:
        file.write(svg)
    with paths[1].open("x", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["curve", x_label, "value"])
        for curve in curves:
            for x, y in zip(curve.series.x.tolist(), curve.series.y.tolist(), strict=True):
                writer.writerow([curve.label or chart_id, x, "" if math.isnan(y) else y])
    return paths


def to_svg(curves: Sequence[Curve], window: PlotWindow, title: str, x_label: str) -> str:
    """Draw the curves within `window` with axes and a legend; raw curves are drawn pale behind smoothed ones."""
    visible = visible_series(curves, window)
    places = _legend_places(curves)
    top = TOP + LINE_HEIGHT * round(max((y for _, y in places), default=20) / LINE_HEIGHT - 1)
    limits = [limit for _, series in visible for limit in series.y_limits() or ()]
    low, high = pad_limits(min(limits, default=0.1), max(limits, default=1.0), window.log)

    def x_to_px(x: float) -> float:
        return LEFT + (x - window.low) / (window.high - window.low) * (WIDTH - LEFT - RIGHT)

    def y_to_px(y: float) -> float:
        share = math.log(y / low) / math.log(high / low) if window.log else (y - low) / (high - low)
        return HEIGHT - BOTTOM - share * (HEIGHT - top - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="13">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<clipPath id="window"><rect x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" '
        f'height="{HEIGHT - top - BOTTOM}"/></clipPath>',
        f'<text x="{LEFT}" y="24" font-weight="bold">{escape(title)}</text>',
        f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 12}" text-anchor="middle">{escape(x_label)}</text>',
    ]
    y_ticks = (log_ticks if window.log else ticks)(low, high, 6)
    for tick, label in zip(y_ticks, tick_labels(y_ticks, log=window.log), strict=True):
        y = y_to_px(tick)
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    x_ticks = ticks(window.low, window.high, 9, whole=window.x_name in WHOLE_AXES)
    for tick, label in zip(x_ticks, tick_labels(x_ticks), strict=True):
        parts.append(f'<text x="{x_to_px(tick):.1f}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{label}</text>')
    for number, (curve, series) in enumerate(visible):
        color, connected = COLORS[number % len(COLORS)], curve.marker in LINE_MARKERS
        if curve.band is not None:
            parts += _area(curve.band, window, x_to_px, y_to_px, color)
        smoothed = smoothed_series(curve, series, window)
        for drawn, opacity in ((series, 1.0),) if smoothed is None else ((series, 0.3), (smoothed, 1.0)):
            parts += _strokes(
                series=drawn,
                window=window,
                x_to_px=x_to_px,
                y_to_px=y_to_px,
                color=color,
                opacity=opacity,
                connected=connected,
                dashes=DASHES if curve.marker == "dashed" else "",
            )
        if curve.label:
            legend_x, legend_y = places[number]
            dashes = DASHES if curve.marker == "dashed" else ""
            symbol = f'<path d="M{legend_x} {legend_y}h24" stroke="{color}" stroke-width="2"{dashes}/>'
            parts.append(
                symbol if connected else f'<circle cx="{legend_x + 12}" cy="{legend_y}" r="4" fill="{color}"/>'
            )
            label = " ".join(filter(None, (curve.mark, printable(curve.label))))
            label = label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…"
            parts.append(f'<text x="{legend_x + 32}" y="{legend_y + 4}">{escape(label)}</text>')
        if curve.mark and (last := (series if smoothed is None else smoothed).latest()) is not None:
            x = min(x_to_px(float(series.x[-1])), WIDTH - RIGHT) + 3
            parts.append(f'<text x="{x:.1f}" y="{y_to_px(last) + 4:.1f}" fill="{color}">{escape(curve.mark)}</text>')
    parts.append(f'<path d="M{LEFT} {top}V{HEIGHT - BOTTOM}H{WIDTH - RIGHT}" fill="none" stroke="black"/></svg>')
    return "\n".join(parts) + "\n"


def _legend_places(curves: Sequence[Curve]) -> list[tuple[float, int]]:
    """Return x and middle y of the legend entry of each curve."""
    if len(curves) <= MAX_ENTRIES_BESIDE_TITLE and all(len(curve.label) <= MAX_SHORT_LABEL for curve in curves):
        return [(LEFT + 260.0 + ENTRY_WIDTH * index, 20) for index in range(len(curves))]
    per_line = (WIDTH - LEFT - RIGHT) // LONG_ENTRY_WIDTH
    return [
        (float(LEFT + LONG_ENTRY_WIDTH * (index % per_line)), 20 + LINE_HEIGHT * (1 + index // per_line))
        for index in range(len(curves))
    ]


def _area(band: tuple[Series, Series], window: PlotWindow, x_to_px: Scale, y_to_px: Scale, color: str) -> list[str]:
    """Return the area between two curves of equal positions, where both are known."""
    low, high = band
    points = [
        (x, bottom, top)
        for x, bottom, top in zip(low.x.tolist(), low.y.tolist(), high.y.tolist(), strict=True)
        if math.isfinite(bottom) and math.isfinite(top) and not (window.log and bottom <= 0)
    ]
    outline = [(x, top) for x, _, top in points] + [(x, bottom) for x, bottom, _ in reversed(points)]
    path = " ".join(f"{x_to_px(x):.1f},{y_to_px(y):.1f}" for x, y in outline)
    return [f'<polygon points="{path}" fill="{color}" opacity="0.2" clip-path="url(#window)"/>'] if points else []


def _strokes(
    *,
    series: Series,
    window: PlotWindow,
    x_to_px: Scale,
    y_to_px: Scale,
    color: str,
    opacity: float,
    connected: bool,
    dashes: str,
) -> list[str]:
    elements = []
    for piece in downsample_min_max(series, window.low, window.high, WIDTH):
        points = [(x_to_px(x), y_to_px(y)) for x, y in zip(piece.x.tolist(), piece.y.tolist(), strict=True)]
        if connected and len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            elements.append(
                f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5" opacity="{opacity}"'
                f'{dashes} clip-path="url(#window)"/>'
            )
        else:
            elements += [
                f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{color}" clip-path="url(#window)"/>' for x, y in points
            ]
    return elements
