"""A figure for a paper: curves of runs over epochs, steps or hours, as SVG, PDF or PNG.

`gputrain report -o FILE.pdf` writes it, and never over a file that it did not make (`write_output`). Runs that differ
in the seed alone are one curve, their mean with its standard deviation."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from engine.base import output_file
from engine.base.errors import Problem, UsageError, did_you_mean, file_errors
from engine.base.files import read_bytes, replace_file
from engine.config.command_line import format_value
from engine.report.charts import Place, charts_of, compared_charts, find_chart
from engine.report.foreign_run import OnRead
from engine.report.lines import Line, ReportedRun, chart_lines, draw_lines, drawing, read_reported_run, shortened
from engine.runs.comparison import (
    MAX_REPORTED_RUNS,
    Comparison,
    RunGroup,
    compare_runs,
    has_key,
    require_comparable,
)
from engine.runs.curves import XAxis, default_axis
from engine.runs.fields import ALIASES
from engine.runs.find import OpenedRun
from engine.runs.journal_source import STEP_METRICS
from engine.runs.keys import parse_key
from engine.runs.metrics import METRIC_PREFIX, METRICS, NO_METRICS, Better, find_key

MARK = "made by gputrain report, which may replace it"
"""What a page and the metadata of a figure in any format say of their origin."""
MAX_REPORT_BYTES = 1 << 28


def check_output(path: Path, *, force: bool) -> None:
    """Raise UsageError if a file must not be written: `gputrain report` did not make it, unless `force`."""
    with suppress(OSError):
        force = force or MARK.encode() in read_bytes(path, MAX_REPORT_BYTES)
    output_file.check_output(path, "report.html", force=force, although=" and is no report")


def write_output(path: Path, data: bytes, *, force: bool) -> Path:
    """Write a file atomically, and return its path. Raises UsageError as `check_output` does, and if writing fails."""
    check_output(path, force=force)
    with file_errors(str(path), "cannot be written", code="not-writable"):
        replace_file(path, lambda file: file.write(data))
    return path


# Without dates and versions, so that the same runs give the same bytes.
METADATA: Mapping[str, Mapping[str, str | None]] = {
    "svg": {"Creator": None, "Date": None, "Format": None, "Type": None, "Description": MARK},
    "pdf": {"Creator": None, "Producer": None, "CreationDate": None, "Subject": MARK},
    "png": {"Software": None, "Description": MARK},
}
PNG_DPI = 300
# Of a page of two columns in inches, as in the templates of IEEE, CVPR and ICML.
WIDTH_IN = 6.75
PANEL_ASPECT = 0.68
# Share of the steps over which losses are averaged.
SMOOTHING = 0.02
X_LABELS: Mapping[XAxis, str] = {"epoch": "Epoch", "step": "Step", "hours": "Hours"}
NO_KEYS: Mapping[str, str] = {}
DEFAULT_METRICS = ("loss", "best_val_accuracy")
# Of a legend above the panels: characters in an inch, for the line beside a label, and inches for a row.
CHARACTERS_PER_IN, ENTRY_CHARACTERS, LEGEND_ROW_IN = 17, 10, 0.17


def find_panel(name: str, own: Collection[str] = (), foreign: Mapping[str, str] = NO_KEYS) -> str:
    """Return the id of the chart that a name means. `own` are the names of the user's own metrics, and `foreign` the
    keys of the metrics of foreign runs by their names there.

    Raises UsageError with the nearest known name.
    """
    name = parse_key(name)
    wanted = name.casefold().replace("-", "_")
    curves = [chart.id for chart in charts_of(Place.PLOT)]
    curves += [key for key, metric in METRICS.items() if metric.epoch is not None or key in STEP_METRICS]
    if wanted in curves:
        return wanted
    if (own_name := name.removeprefix(METRIC_PREFIX)) in own:
        return METRIC_PREFIX + own_name
    if name in foreign:
        return foreign[name]
    # `learning_rate` and `optim.lr` mean the curve `lr`, as `lr` means the config key elsewhere.
    meant = find_key(name) or ALIASES.get(wanted, wanted)
    if (key := next((key for key in curves if meant in (key, ALIASES.get(key))), None)) is not None:
        return key
    known, meanings = [*curves, *own, *foreign], {*curves, *map(ALIASES.get, curves)}
    aliases = [alias for alias, key in ALIASES.items() if key in meanings]
    advice = did_you_mean(wanted, [*known, *aliases]) or f"; choose one of {', '.join(known)}"
    raise UsageError.one("--metric", f"{name} is no metric of a curve{advice}", code="unknown-value")


def file_format(path: Path) -> str:
    """Return the format of a figure that the name of a file asks for. Raises UsageError for any other."""
    suffix = path.suffix.casefold().removeprefix(".")
    if suffix not in METADATA:
        reason = f"{path.name} must end in .html (a page), .svg or .pdf (vector graphics), or .png"
        raise UsageError.one("-o", reason, "such as report.html or curves.pdf", code="wrong-format")
    return suffix


def make_plot(
    found: Sequence[OpenedRun],
    kind: str,
    *,
    metrics: Sequence[str] = (),
    axis: XAxis | None = None,
    log: bool = False,
    directions: Mapping[str, Better] = NO_METRICS,
    warn: Callable[[Problem], object] = lambda warning: None,
    on_read: OnRead | None = None,
) -> bytes:
    """Return the figure of these runs as a file of one of the formats. The same files give the same figure.

    `metrics` are names for `find_panel`, by default those that the runs have of `DEFAULT_METRICS`, and `axis` is the
    epoch if all runs have it. `directions` are the stored directions of the user's own metrics. `on_read` is called
    while a foreign run is read.

    Raises UsageError if a metric is unknown or has no value in any run, or if matplotlib is not installed.
    """
    require_comparable(len(found), MAX_REPORTED_RUNS)
    runs = [read_reported_run(run, on_read=on_read) for run in found]
    axis = _axis(runs, axis)
    comparison = compare_runs([run.row for run in runs])
    for note in comparison.notes:
        warn(note)
    columns = comparison.columns(grouped=True)
    groups = [[runs[index] for index in column] for column in columns]
    panels = [find_chart(key, directions) for key in _panel_keys(runs, metrics)]
    lines = [chart_lines(panel, groups, axis, SMOOTHING) for panel in panels]
    for panel, drawn in zip(panels, lines, strict=True):
        if not drawn:
            reason = f"no run has a value of {panel.id}, so there is nothing to plot"
            raise UsageError.one("--metric", reason, code="not-recorded")
    titles, rows_height = [panel.title for panel in panels], 0.0
    if len(groups) > 1:
        titles = [
            drawn[0].label if len(panel.metrics) > 1 else panel.title
            for panel, drawn in zip(panels, lines, strict=True)
        ]
        room = int(WIDTH_IN * CHARACTERS_PER_IN)
        labels = column_labels(comparison, columns, room - ENTRY_CHARACTERS)
        lines = [[replace(line, label=labels[line.style]) for line in drawn] for drawn in lines]
        legend_columns = max(min(room // (max(map(len, labels)) + ENTRY_CHARACTERS), len(labels)), 1)
        rows_height = -(-len(labels) // legend_columns) * LEGEND_ROW_IN
    with drawing() as figure_class:
        height = WIDTH_IN / len(panels) * PANEL_ASPECT + rows_height
        figure = figure_class(figsize=(WIDTH_IN, height), layout="constrained")
        handles: dict[object, Any] = {}
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel, drawn, title in zip(all_axes, panels, lines, titles, strict=True):
            draw_lines(axes, drawn, axis, log=log and (panel.log or not _are_shares(drawn)))
            axes.set_xlabel(X_LABELS[axis])
            axes.set_ylabel(shortened(title))
            handles |= {handle.get_label(): handle for handle in axes.get_legend_handles_labels()[0]}
            if len(groups) == 1 and len(drawn) > 1:
                axes.legend(loc="best")
        if handles and len(groups) > 1:
            figure.legend([*handles.values()], [*map(str, handles)], loc="outside upper center", ncols=legend_columns)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=METADATA[kind])
    return buffer.getvalue()


def _axis(runs: Sequence[ReportedRun], wanted: XAxis | None) -> XAxis:
    """Return the x axis: the wanted one, else epochs if all runs have them. Raises UsageError if a run does not."""
    if wanted is None:
        return default_axis(run.curves for run in runs)
    for run in runs:
        if not run.curves.is_own and wanted not in run.curves.axes:
            known = " or ".join(axis for axis in X_LABELS if all(axis in other.curves.axes for other in runs))
            raise UsageError.one(
                "--x", f"{run.row.name} has no record of {wanted}", f"use {known}", code="not-recorded"
            )
    return wanted


def _panel_keys(runs: Sequence[ReportedRun], names: Sequence[str]) -> list[str]:
    """Return the ids of the charts: those of `names`, else the default ones that have a curve.

    Foreign runs have charts of their other metrics in place of missing ones.
    """

    def has_curve(chart: str) -> bool:
        return any(run.curves.has(key) for key in find_chart(chart).metrics for run in runs)

    foreign_curves = [run.curves for run in runs if not run.curves.is_own]
    foreign = {name: key for curves in foreign_curves for name, key in curves.keys.items()}
    if not names:
        charts = compared_charts([run.curves for run in runs], [find_chart(name) for name in DEFAULT_METRICS])
        return [chart.id for chart in charts[: len(DEFAULT_METRICS)]] or [*DEFAULT_METRICS]
    own = list(dict.fromkeys(name for run in runs for name in run.curves.own_names))
    panels = {name: find_panel(name, own, foreign) for name in names}
    # The `loss` of a program that has no other one.
    keys = (foreign[name] if name in foreign and not has_curve(panel) else panel for name, panel in panels.items())
    return list(dict.fromkeys(keys))


def column_labels(comparison: Comparison, columns: Sequence[RunGroup], max_characters: int) -> list[str]:
    """Return a label for each curve: the name of the run, and the config values that differ and change its result.

    A group has the name of its first run and the number of its seeds.
    """
    labels = []
    for column in columns:
        first, run = column[0], comparison.runs[column[0]]
        words = [
            f"{_key_name(difference.key)} {_value(difference.values[first])}"
            for difference in comparison.differences
            if has_key(run, difference.key)
            # In a group, the seeds differ.
            and all(len({_value(difference.values[run]) for run in other}) == 1 for other in columns)
        ]
        name = f"{run.name} ({len(column)} seeds)" if len(column) > 1 else run.name
        labels.append(shortened(f"{name}: {', '.join(words)}" if words else name, max_characters))
    return labels


def _key_name(key: str) -> str:
    """Return `lr` for `optim.lr` and for the parameter `lr` of a command, but `optim` for `optim.name`."""
    section, _, name = key.partition(".")
    return section if name in ("", "name") else name


def _value(value: object) -> str:
    return format_value(float(f"{value:.3g}") if isinstance(value, float) else value) or "none"


def _are_shares(lines: Sequence[Line]) -> bool:
    """Whether all values are from 0 to 1."""
    return all(np.nanmin(line.series.y) >= 0 and np.nanmax(line.series.y) <= 1 for line in lines)
