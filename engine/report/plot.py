"""A figure for a paper: curves of runs over epochs, steps, images or hours, as SVG, PDF or PNG.

`gputrain report -o FILE.pdf` writes it. Runs that differ in the seed alone are one curve, their mean with its standard
deviation.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.config.command_line import format_value
from engine.config.differences import KeyDifference, is_neutral
from engine.report.lines import FAINT_OPACITY, Line, draw_lines, make_line, whole_x_ticks
from engine.report.output import make_mark
from engine.report.runs import ForeignReport, ReportedRun, read_reported_run
from engine.report.sections import short_name
from engine.report.style import PRINT, dashes, drawing
from engine.runs.comparison import Column, Comparison, compare_runs, require_comparable
from engine.runs.curves import XAxis
from engine.runs.fields import ALIASES
from engine.runs.find import OpenedRun
from engine.runs.keys import parse_key
from engine.runs.metrics import METRIC_PREFIX, METRICS, Better, find_key
from engine.runs.reduced_curves import STEP_CURVES
from engine.show.charts import Chart, Place, Source, charts_of, find_chart
from engine.show.foreign_run import OnRead, default_axis, further_keys
from engine.utils.errors import Problem, UsageError, did_you_mean
from engine.utils.libraries import import_library
from engine.utils.text import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COMMAND = "gputrain report"
MARK_KIND = "plot"
FORMATS = ("svg", "pdf", "png")
PNG_DPI = 300
# Of a page of two columns in inches, as in the templates of IEEE, CVPR and ICML.
WIDTHS = {"column": 3.25, "page": 6.75}
MIN_WIDTH, MAX_WIDTH = 1.0, 40.0
CM_PER_INCH = 2.54
PANEL_ASPECT = 0.68
FONT_SIZE, LINE_WIDTH = 8.0, 1.1
DEFAULT_SMOOTHING = 0.02
X_LABELS: Mapping[XAxis, str] = {"epoch": "Epoch", "step": "Step", "images": "Training images", "hours": "Hours"}
NO_KEYS: Mapping[str, str] = {}
DEFAULT_METRICS = ("loss", "best_val_accuracy")
# Of a legend above the panels: characters in an inch, for the line beside a label, and inches for a row.
CHARACTERS_PER_IN, ENTRY_CHARACTERS, LEGEND_ROW_IN = 17, 10, 0.17


@dataclass(frozen=True)
class PlotOptions:
    """What a figure shows. `metrics` are names for `find_panel`, by default those that the runs have of
    `DEFAULT_METRICS`, and `axis` is the epoch if all runs have it. `width_in` is in inches, `smoothing` a share of the
    steps from 0 to 1."""

    metrics: tuple[str, ...] = ()
    axis: XAxis | None = None
    width_in: float = WIDTHS["page"]
    smoothing: float = DEFAULT_SMOOTHING
    log: bool = False
    grouped: bool = True
    directions: Mapping[str, Better] = field(default_factory=dict)
    """The stored directions of the user's own metrics."""


def find_panel(name: str, own: Collection[str] = (), foreign: Mapping[str, str] = NO_KEYS) -> str:
    """Return the id of the chart that a name means. `own` are the names of the user's own metrics, and `foreign` the
    keys of the metrics of foreign runs by their names there.

    Raises UsageError with the nearest known name.
    """
    name = parse_key(name)
    wanted = name.casefold().replace("-", "_")
    curves = [chart.id for chart in charts_of(Place.PLOT)]
    curves += [key for key, metric in METRICS.items() if metric.epoch is not None or key in STEP_CURVES]
    if wanted in curves:
        return wanted
    if (own_name := name.removeprefix(METRIC_PREFIX)) in own:
        return METRIC_PREFIX + own_name
    if name in foreign:
        return foreign[name]
    # `learning_rate` and `optim.lr` mean the curve `lr`, as `lr` means the config key elsewhere.
    meant = find_key(name) or ALIASES.get(wanted, wanted)
    for key in curves:
        if meant in (key, ALIASES.get(key)):
            return key
    known = [*curves, *own, *foreign]
    meanings = {*curves, *map(ALIASES.get, curves)}
    aliases = [alias for alias, key in ALIASES.items() if key in meanings]
    advice = did_you_mean(wanted, [*known, *aliases]) or f"; choose one of {', '.join(known)}"
    raise UsageError.one("--metric", f"{name} is no metric of a curve{advice}", code="unknown-value")


def plotted_curves(chart: Chart) -> list[str]:
    """Return the keys of the curves in a figure, the main one first."""
    sources = (Source.VALIDATION, Source.TRAINING, Source.ONLY)
    return [key for wanted in sources for key, source in chart.metrics.items() if source is wanted]


def parse_width(text: str) -> float:
    """Return a width in inches: `3.25`, `3.25in`, `8.2cm`, `82mm`, `column` or `page`. Raises UsageError."""
    word = text.strip().casefold()
    if word in WIDTHS:
        return WIDTHS[word]
    unit = next((unit for unit in ("in", "cm", "mm") if word.endswith(unit)), "")
    try:
        number = float(word.removesuffix(unit))
    except ValueError:
        number = float("nan")
    inches = number / {"": 1.0, "in": 1.0, "cm": CM_PER_INCH, "mm": 10 * CM_PER_INCH}[unit]
    if not MIN_WIDTH <= inches <= MAX_WIDTH:
        allowed = f"must be {MIN_WIDTH:g} to {MAX_WIDTH:g} inches, such as 3.25, 8.2cm, column or page"
        raise UsageError.one("--width", f"{text} is not allowed: {allowed}", code="out-of-range")
    return inches


def file_format(path: Path) -> str:
    """Return the format of a figure that the name of a file asks for. Raises UsageError for any other."""
    suffix = path.suffix.casefold().removeprefix(".")
    if suffix not in FORMATS:
        ending = f"{path.name} ends in .{suffix}" if suffix else f"{path.name} has no ending"
        raise UsageError.one(
            "-o",
            f"{ending}: must be .html (a page), .svg or .pdf (vector graphics), or .png",
            "such as report.html or curves.pdf",
            code="wrong-format",
        )
    return suffix


def make_plot(
    found: Sequence[OpenedRun],
    options: PlotOptions,
    kind: str,
    warn: Callable[[Problem], object] = lambda warning: None,
    on_read: OnRead | None = None,
) -> bytes:
    """Return the figure of these runs as a file of one of `FORMATS`. The same files give the same figure.

    `on_read` is called while a foreign run is read.

    Raises UsageError if a metric is unknown or has no value in any run, or if matplotlib is not installed.
    """
    require_comparable(len(found))
    runs = [read_reported_run(run, on_read=on_read) for run in found]
    axis = _axis(runs, options.axis)
    keys = _panel_keys(runs, options.metrics)
    comparison = compare_runs([run.compared for run in runs])
    for note in comparison.notes:
        warn(note)
    columns = comparison.columns(grouped=options.grouped)
    labels = column_labels(comparison, columns, int(options.width_in * CHARACTERS_PER_IN) - ENTRY_CHARACTERS)
    groups = [[runs[index] for index in column.runs] for column in columns]
    panels = [find_chart(key, options.directions) for key in keys]
    lines = [_panel_lines(panel, groups, labels, options, axis) for panel in panels]
    for key, drawn in zip(keys, lines, strict=True):
        if not drawn:
            raise UsageError.one(
                "--metric", f"no run has a value of {key}, so there is nothing to plot", code="not-recorded"
            )
    mark = make_mark(MARK_KIND, [run.name for run in found])
    entries = {line.label: line for drawn in lines for line in drawn}
    rows = -(-len(entries) // _legend_columns([*entries], options.width_in)) if len(entries) > 1 else 0
    with drawing(COMMAND, PRINT, FONT_SIZE) as figure_class:
        height = options.width_in / len(panels) * PANEL_ASPECT + rows * LEGEND_ROW_IN
        figure = figure_class(figsize=(options.width_in, height), layout="constrained")
        all_axes = figure.subplots(1, len(panels), squeeze=False)[0]
        for axes, panel, drawn in zip(all_axes, panels, lines, strict=True):
            log = options.log and (panel.log or not _are_shares(drawn))
            draw_lines(axes, drawn, PRINT, log=log, width=LINE_WIDTH)
            axes.set_xlabel(X_LABELS[axis])
            whole_x_ticks(axes, axis)
            axes.set_ylabel(printable(short_name(panel.title)))
            if len(panel.metrics) > 1:
                _add_kind_legend(axes, panel)
        if rows:
            _add_run_legend(figure, entries)
        buffer = io.BytesIO()
        figure.savefig(buffer, format=kind, dpi=PNG_DPI, metadata=_metadata(kind, mark))
    return buffer.getvalue()


def _axis(runs: Sequence[ReportedRun], wanted: XAxis | None) -> XAxis:
    """Return the x axis: the wanted one, else epochs if all runs have them. Raises UsageError if a run does not."""
    if wanted is None:
        return default_axis(run.curves for run in runs)
    for run in runs:
        if isinstance(run, ForeignReport) and not run.curves.knows(wanted):
            known = " or ".join(axis for axis in X_LABELS if all(other.curves.knows(axis) for other in runs))
            raise UsageError.one("--x", f"{run.name} has no record of {wanted}", f"use {known}", code="not-recorded")
    return wanted


def _panel_keys(runs: Sequence[ReportedRun], names: Sequence[str]) -> list[str]:
    """Return the ids of the charts: those of `names`, else the default ones.

    Foreign runs show the default charts that they have a curve of, then charts of their other metrics.
    """
    foreign_curves = [run.curves for run in runs if isinstance(run, ForeignReport)]
    foreign = {name: key for curves in foreign_curves for name, key in curves.keys.items()}
    if names or not foreign:
        own = list(dict.fromkeys(name for run in runs for name in run.curves.own_names))
        panels = [find_panel(name, own, foreign) for name in names or DEFAULT_METRICS]
        for index, name in enumerate(names):
            # The `loss` of a program that has no other one.
            if name in foreign and not any(
                run.curves.has(key) for key in find_chart(panels[index]).metrics for run in runs
            ):
                panels[index] = foreign[name]
        return list(dict.fromkeys(panels))
    shown = {key for name in DEFAULT_METRICS for key in find_chart(name).metrics}
    keys = [
        name for name in DEFAULT_METRICS if any(run.curves.has(key) for key in find_chart(name).metrics for run in runs)
    ]
    return [*keys, *further_keys(foreign_curves, shown)][: len(DEFAULT_METRICS)]


def column_labels(comparison: Comparison, columns: Sequence[Column], max_characters: int) -> list[str]:
    """Return a label for each curve: the name of the run, and the config values that differ and change its result.

    A group has the name of its first run and the number of its seeds. An ellipsis stands for values without room.
    """
    keys = [
        difference
        for difference in comparison.differences
        if not is_neutral(difference.key)
        # In a group, the seeds differ.
        and all(len({_value(difference.values[run]) for run in column.runs}) == 1 for column in columns)
    ]
    labels: list[str] = []
    for shown in range(len(keys), -1, -1):
        labels = [_label(comparison, column, keys[:shown], len(keys) - shown) for column in columns]
        if max(map(len, labels)) <= max_characters:
            break
    return labels


def _label(comparison: Comparison, column: Column, keys: Sequence[KeyDifference], hidden: int) -> str:
    first = column.runs[0]
    run = comparison.runs[first]
    name = f"{run.name} ({len(column.runs)} seeds)" if column.is_group else run.name
    words = [
        f"{_key_name(difference.key)} {_value(difference.values[first])}"
        for difference in keys
        if run.has_key(difference.key)
    ]
    words += ["…"] if words and hidden else []
    return printable(f"{name}: {', '.join(words)}" if words else name)


def _key_name(key: str) -> str:
    """Return `lr` for `optim.lr` and for the parameter `lr` of a command, but `optim` for `optim.name`."""
    section, _, name = key.partition(".")
    return section if name in ("", "name") else name


def _value(value: object) -> str:
    return format_value(_rounded(value)) or "none"


def _rounded(value: object) -> object:
    """Round numbers to three digits, also within a list or a mapping."""
    match value:
        case float():
            return float(f"{value:.3g}")
        case list():
            return [_rounded(part) for part in value]
        case dict():
            return {key: _rounded(part) for key, part in value.items()}
    return value


def _panel_lines(
    panel: Chart, groups: Sequence[Sequence[ReportedRun]], labels: Sequence[str], options: PlotOptions, axis: XAxis
) -> list[Line]:
    """Return the curves of a panel that have a value. The second curve of each run is thin and pale."""
    lines, keys = [], plotted_curves(panel)
    for index, (runs, label) in enumerate(zip(groups, labels, strict=True)):
        for number, key in enumerate(keys):
            is_short = any(isinstance(run, ForeignReport) and not run.curves.is_long(key) for run in runs)
            smoothing = options.smoothing if panel.is_smoothed(key) and not is_short else 0.0
            line = make_line(label, [run.curves.over(key, axis) for run in runs], index, smoothing=smoothing)
            # Raw values of several runs would hide each other.
            line = replace(line, is_faint=number > 0, raw=line.raw if len(groups) == len(keys) == 1 else None)
            if np.isfinite(line.series.y).any():
                lines.append(line)
    return lines


def _are_shares(lines: Sequence[Line]) -> bool:
    """Whether all values are from 0 to 1."""
    return all(np.nanmin(line.series.y) >= 0 and np.nanmax(line.series.y) <= 1 for line in lines)


def _legend_columns(labels: Sequence[str], width_in: float) -> int:
    entry = max(map(len, labels)) + ENTRY_CHARACTERS
    return max(1, min(len(labels), int(width_in * CHARACTERS_PER_IN) // entry))


def _add_run_legend(figure: Figure, lines: Mapping[str, Line]) -> None:
    """Name the runs above the panels by their labels; a single run needs no name."""
    handles = [_handle(PRINT.color(line.color), line.dash) for line in lines.values()]
    # A legend leaves out labels that begin with an underscore.
    labels = [f" {label}" if label.startswith("_") else label for label in lines]
    columns = _legend_columns(labels, figure.get_figwidth())
    figure.legend(handles, labels, loc="outside upper center", ncols=columns, handlelength=3.0)


def _add_kind_legend(axes: Axes, panel: Chart) -> None:
    """Name the curves of one run within a panel: the main one is thick."""
    keys = plotted_curves(panel)
    handles = [_handle(PRINT.ink, 0, is_faint=number > 0) for number in range(len(keys))]
    axes.legend(handles, [METRICS[key].label for key in keys], loc="best", handlelength=3.0)


def _handle(color: str, dash: int, *, is_faint: bool = False) -> Any:
    width, opacity = (0.6 * LINE_WIDTH, FAINT_OPACITY) if is_faint else (LINE_WIDTH, 1.0)
    handle = import_library("matplotlib.lines", COMMAND).Line2D([], [], color=color, linewidth=width, alpha=opacity)
    if pattern := dashes(dash):
        handle.set_dashes(pattern)
    return handle


def _metadata(kind: str, mark: str) -> dict[str, str | None]:
    """Return metadata without dates and versions, so that the same runs give the same bytes."""
    if kind == "svg":
        return {"Creator": None, "Date": None, "Format": None, "Type": None, "Description": mark}
    if kind == "pdf":
        return {"Creator": None, "Producer": None, "CreationDate": None, "Subject": mark}
    return {"Software": None, "Description": mark}
