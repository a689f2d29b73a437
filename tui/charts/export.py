"""Export of all points of a chart as CSV. `tui.screens.charts` calls it."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from tui.charts.plot import Curve


def export_chart(run_name: str, chart_id: str, curves: Sequence[Curve], x_label: str, folder: Path) -> Path:
    """Write all points of a chart as CSV, and return the path. Raises OSError if writing fails.

    The file is named after run and chart, with a number if the name is in use.
    """
    name = f"{run_name}-{chart_id}"
    names = (f"{name}.csv" if number == 1 else f"{name}-{number}.csv" for number in count(1))
    path = next(folder / name for name in names if not (folder / name).exists())
    with path.open("x", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["curve", x_label, "value"])
        for curve in curves:
            for x, y in zip(curve.series.x.tolist(), curve.series.y.tolist(), strict=True):
                writer.writerow([curve.label or chart_id, x, "" if math.isnan(y) else y])
    return path
